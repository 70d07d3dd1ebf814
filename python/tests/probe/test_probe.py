"""The planner's dry calls: the answers of the process, which user code can't corrupt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout.sandbox import Sandbox
from rollout_testing.daemon import sandbox_binary

SOURCE = Path(__file__).parents[2]
SAMPLE = {"prompt": "1+1=", "completion": "2", "row": {"answer": "2"}}


def probe(request: dict[str, Any]) -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, "-m", "rollout.probe"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def call(folder: Path, body: str, *, timeout: float = 10.0) -> dict[str, Any]:
    (folder / "reward.py").write_text(body)
    request = {"plugin": "reward.py:reward", "base_dir": str(folder), "timeout_seconds": timeout, "samples": [SAMPLE]}
    return probe({"reward": request})["reward"]


def test_the_calls_of_environments_are_imported_without_grpc() -> None:
    """Only sidecars need it, and each probe would wait for its import."""
    code = "import sys, rollout.probe.__main__, rollout.probe.episode; assert 'grpc' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_versions_are_found_without_importing() -> None:
    answer = probe({"packages": ["torch", "unobtainium"]})
    assert answer["packages"]["torch"]
    assert answer["packages"]["unobtainium"] is None
    assert answer["python"] == sys.version.split()[0]


def test_the_reward_is_called_and_its_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("def one(): return 1.0\n")
    answer = call(tmp_path, "import neighbour\ndef reward(s): return [{'reward': neighbour.one(), 'n': len(s)} for x in s]\n")
    assert answer["scores"] == [{"reward": 1.0, "metrics": {"n": 1.0}}]
    assert answer["files"] == [str(tmp_path / "neighbour.py"), str(tmp_path / "reward.py")]


def test_a_held_out_row_is_scored_by_a_call_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward(samples): return [float(s.row['answer'] == '2') for s in samples]\n")
    request = {"plugin": "reward.py:reward", "base_dir": str(tmp_path), "timeout_seconds": 10.0, "samples": [SAMPLE]}
    assert len(probe({"reward": request | {"held_out": [SAMPLE]}})["reward"]["scores"]) == 1
    error = probe({"reward": request | {"held_out": [SAMPLE | {"row": {"solution": "2"}}]}})["reward"]["error"]
    assert error["message"] == "on the first held-out row: `reward` raised KeyError: 'answer'"
    assert error["line"] == 1


def test_no_torch_is_imported(tmp_path: Path) -> None:
    body = "import sys\ndef reward(s): return [float('torch' in sys.modules or 'transformers' in sys.modules)]\n"
    assert call(tmp_path, body)["scores"][0]["reward"] == 0.0


def test_prints_do_not_spoil_the_answer(tmp_path: Path) -> None:
    body = "import os\nprint('hello')\ndef reward(s):\n    os.write(1, b'{}')\n    os.system('echo noise')\n    return [1.0]\n"
    assert call(tmp_path, body)["scores"][0]["reward"] == 1.0


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("import threading\ndef reward(s):\n    threading.Event().wait()\n", 3),
        ("def reward(s):\n    while True:\n        pass\n", 3),
        ("import asyncio\nasync def reward(s):\n    await asyncio.Event().wait()\n", 0),
        ("import threading\nthreading.Event().wait()\ndef reward(s): return [1.0]\n", 2),
    ],
)
def test_a_call_that_hangs_is_named_with_its_line(tmp_path: Path, body: str, line: int) -> None:
    error = call(tmp_path, body, timeout=0.2)["error"]
    assert error["reason"] == "REWARD_TIMEOUT"
    assert "took longer than 0.2 s" in error["message"]
    if line:
        assert error["file"] == str(tmp_path / "reward.py")
        assert error["line"] in (line, line - 1)


def test_threads_left_behind_keep_nobody_waiting(tmp_path: Path) -> None:
    body = "import threading\ndef reward(s):\n    threading.Thread(target=threading.Event().wait).start()\n    return [1.0]\n"
    assert call(tmp_path, body)["scores"][0]["reward"] == 1.0


def test_an_error_is_placed(tmp_path: Path) -> None:
    error = call(tmp_path, "def reward(s):\n    return [s[0].row['anwser']]\n")["error"]
    assert (error["reason"], error["line"], error["column"]) == ("REWARD_RAISED", 2, 5)
    assert error["text"].strip() == "return [s[0].row['anwser']]"


LIMITS = {"memory_bytes": 512 << 20, "pids": 64, "cpus": 0.0, "output_bytes": 1 << 20, "disk_bytes": 8 << 20}


@pytest.mark.parametrize(
    ("body", "reason", "line"),
    [
        ("from neighbour import one\ndef reward(s): return [one()]\n", "", 0),
        ("def reward(s):\n    return [float(open('/etc/shadow').read() == '')]\n", "REWARD_RAISED", 2),
        ("import socket\ndef reward(s):\n    socket.create_connection(('127.0.0.1', 9))\n", "REWARD_NO_NETWORK", 3),
        ("def reward(s):\n    return bytearray(8 << 30)\n", "REWARD_OUT_OF_MEMORY", 0),
        ("import os\ndef reward(s):\n    os.kill(os.getpid(), 9)\n", "REWARD_KILLED", 0),
    ],
)
def test_a_reward_with_a_sandbox_is_called_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str, line: int
) -> None:
    monkeypatch.setenv("ROLLOUT_SANDBOX", sandbox_binary())
    if error := Sandbox.probe().error:
        pytest.skip(f"this host builds no sandboxes: {error}")
    (tmp_path / "neighbour.py").write_text("def one(): return 1.0\n")
    (tmp_path / "reward.py").write_text(body)
    request = {
        "plugin": "reward.py:reward",
        "base_dir": str(tmp_path),
        "timeout_seconds": 30.0,
        "samples": [SAMPLE],
        "sandbox": LIMITS,
    }
    answer = probe({"reward": request})["reward"]
    if not reason:
        assert answer["scores"] == [{"reward": 1.0, "metrics": {}}]
        assert set(answer["files"]) == {str(tmp_path / "reward.py"), str(tmp_path / "neighbour.py")}
        return
    assert (answer["error"]["reason"], answer["error"]["line"] if line else 0) == (reason, line)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of one token a character with a chat template that uses what templates use."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = "0123456789+= \nabcdefghijklmnopqrstuvwxyz<>|[]\"'{}:,"
    vocabulary = {token: index for index, token in enumerate(("<unk>", "<eos>", *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    template = (
        "{%- for message in messages %}\n"
        "  {%- if message.role not in ('user', 'system', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}\n"
        "<|{{ message.role }}|>{{ message.content | trim }}{{ {'a': 'ü'} | tojson }}{{ eos_token }}\n"
        "{% endfor %}\n"
        "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    folder = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", chat_template=template
    ).save_pretrained(folder)
    return folder


def measure(model: Path, rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    file = model / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = {"path": str(file), "prompt_field": "prompt", "limit": 10**9} | {
        k: v for k, v in options.items() if k in ("limit", "answer_fields")
    }
    request = {"model": str(model), "chat_template": options.get("chat_template", False), "files": [entry]}
    return probe({"tokenizer": request})["tokenizer"]


def test_rows_that_leave_no_room_are_named(model: Path) -> None:
    rows = [{"prompt": "1" * n} for n in (3, 5, 4, 9)]
    (lengths,) = measure(model, rows, limit=4)["files"]
    assert lengths["examples"] == [{"row": 1, "tokens": 5}, {"row": 3, "tokens": 9}]
    assert (lengths["longest"], lengths["over"], lengths["rows"]) == (9, 2, 4)


def test_many_rows_are_counted_and_twenty_named(model: Path) -> None:
    (lengths,) = measure(model, [{"prompt": "111"}] * 10_000, limit=2)["files"]
    assert (lengths["over"], len(lengths["examples"])) == (10_000, 20)
    assert lengths["examples"][19]["row"] == 19


def test_answers_count_where_they_are_trained_on(model: Path) -> None:
    (lengths,) = measure(model, [{"prompt": "1+1=", "answer": "22"}], answer_fields=["answer"])["files"]
    assert lengths["longest"] == 4 + 2 + 1


def test_completions_that_are_messages_count_as_their_texts(model: Path) -> None:
    user, right, wrong = (
        {"role": role, "content": text} for role, text in (("user", "1+1="), ("assistant", "2"), ("assistant", "11"))
    )
    options = {"chat_template": True, "answer_fields": ["chosen", "rejected"]}
    (texts,) = measure(model, [{"prompt": "1+1=", "chosen": "2", "rejected": "11"}], **options)["files"]
    (messages,) = measure(model, [{"chosen": [user, right], "rejected": [user, wrong]}], **options)["files"]
    assert messages == texts and texts["longest"] > 7


def test_a_prompt_without_tokens_is_named(model: Path) -> None:
    (lengths,) = measure(model, [{"prompt": "1"}, {"prompt": ""}])["files"]
    assert lengths["empty"] == [1]


def test_chats_are_rendered_as_transformers_does(model: Path) -> None:
    from transformers import AutoTokenizer

    chats = [[{"role": "system", "content": " be brief "}, {"role": "user", "content": "1+1="}], "what is 1+2"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    wanted = [
        len(
            tokenizer(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": chat}] if isinstance(chat, str) else chat,
                    add_generation_prompt=True,
                    tokenize=False,
                ),
                add_special_tokens=False,
            ).input_ids
        )
        for chat in chats
    ]
    for chat, want in zip(chats, wanted, strict=True):
        assert measure(model, [{"prompt": chat}], chat_template=True)["files"][0]["longest"] == want


def test_conversations_count_whole_with_the_end(model: Path) -> None:
    from transformers import AutoTokenizer

    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    tokenizer = AutoTokenizer.from_pretrained(model)
    whole = tokenizer(tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False).input_ids
    rows = [{"prompt": talk}, {"prompt": talk[:1], "answer": "2"}]
    (lengths,) = measure(model, rows, chat_template=True, answer_fields=["answer"], limit=len(whole))["files"]
    assert lengths["longest"] == len(whole) + 1 and lengths["examples"][0]["row"] == 0


def test_a_template_that_refuses_a_prompt(model: Path) -> None:
    error = measure(model, [{"prompt": [{"role": "judge", "content": "x"}]}], chat_template=True)["error"]
    assert error["reason"] == "BAD_MODEL"
    assert "no such role" in error["message"]
