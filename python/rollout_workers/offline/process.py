"""The process behind ``rollout infer batch``. It needs no services: it loads a model, samples and
scores the rows of a dataset, and writes the output.

Standard output gets one JSON object per line: ``loading`` (the model), ``begin`` (how much there is
to do), ``progress`` (twice a second), and finally ``end``, ``interrupted``, or ``error``. A killed
process loses at most the rows in flight; a process with the same spec continues from the journal.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rollout.algorithm import rewarded
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.errors import RolloutError
from rollout.plugin import RewardError
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout.source import hub
from rollout.source.baseline import with_baseline
from rollout.source.errors import BadBaseline, BadSource, SourceError
from rollout_workers.offline import output, scores
from rollout_workers.offline.dataset import Dataset, library, read_rows
from rollout_workers.offline.errors import (
    EXIT_DATA,
    EXIT_INTERRUPTED,
    EXIT_NO_INPUT,
    EXIT_SOFTWARE,
    BadModel,
    BadPrompt,
    BatchError,
    MissingFile,
    SamplesFailed,
    WeightsDiffer,
)
from rollout_workers.offline.inputs import inputs_of
from rollout_workers.offline.journal import Journal
from rollout_workers.offline.library_suite import evaluate, inputs_of_library
from rollout_workers.offline.spec import BatchSpec, load_spec
from rollout_workers.weights.pretrained import WeightsIncomplete

log = logging.getLogger(__name__)

_SHOWN = 3


def infer(path: str) -> int:
    """Run the batch that the spec at ``path`` describes. Returns the exit code."""
    try:
        spec = load_spec(path)
        os.environ.setdefault("OMP_NUM_THREADS", str(spec.threads))
        return asyncio.run(_Library(spec).run() if spec.library else _Batch(spec).run())
    except BatchError as error:
        return _failed(error, error.code)
    except SourceError as error:
        return _failed(error, EXIT_DATA if isinstance(error, BadSource | BadBaseline) else EXIT_NO_INPUT)
    except (RewardError, WeightsIncomplete) as error:
        return _failed(error, EXIT_DATA)
    except Exception as error:
        log.exception("the batch failed")
        _report("error", code=EXIT_SOFTWARE, reason="INTERNAL", message=repr(error), fix="see the log for the stack trace")
        return EXIT_SOFTWARE


def _failed(error: RolloutError, code: int) -> int:
    message = f"{error.place}: {error.message}" if error.place else error.message
    _report("error", code=code, reason=error.reason, message=message, fix=error.fix)
    return code


def _report(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}, ensure_ascii=False), flush=True)


class _Library:
    """A suite of a library, see :mod:`rollout_workers.offline.library_suite`."""

    def __init__(self, spec: BatchSpec) -> None:
        self._spec = spec
        self._stop = asyncio.Event()

    async def run(self) -> int:
        spec, loop = self._spec, asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        library()
        if not spec.library["url"]:
            return await self._ready()
        inputs = await asyncio.to_thread(inputs_of_library, spec, spec.weights_digest)
        end = await evaluate(spec, spec.weights_digest, inputs, self._stop)
        if end is None:
            _report("interrupted", rows=0, of=0, journal="")
            return EXIT_INTERRUPTED
        _report("end", **end)
        return 0

    async def _ready(self) -> int:
        spec = await asyncio.to_thread(_with_model, self._spec)
        _report("loading", model=spec.model, rows=0)
        model = await asyncio.to_thread(_load, spec)
        try:
            digest = await model.engine.weights_digest()
        finally:
            await model.engine.shutdown()
        if spec.weights_digest not in ("", digest):
            raise WeightsDiffer(f"the loaded weights have the digest {digest}, but the snapshot names {spec.weights_digest}")
        inputs = await asyncio.to_thread(inputs_of_library, spec, digest)
        if not spec.restart and (ended := scores.ended(spec.scores, inputs)):
            _report("end", **ended)
        else:
            _report("ready", model=spec.model, model_digest=digest)
        return 0


class _Batch:
    def __init__(self, spec: BatchSpec) -> None:
        self._spec = spec
        self._stop = asyncio.Event()
        self._dropped = 0

    async def run(self) -> int:
        spec, loop = self._spec, asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        if spec.parquet:
            library()
        data = await asyncio.to_thread(
            read_rows, spec.data, spec.limit, base_dir=spec.base_dir, subset=spec.subset, split=spec.split
        )
        if spec.baseline:
            data = replace(data, rows=await asyncio.to_thread(with_baseline, data.rows, spec.baseline))
        spec = self._spec = await asyncio.to_thread(_with_model, spec)
        _report("loading", model=spec.model, rows=len(data.rows))
        model = await asyncio.to_thread(_load, spec)
        journal: Journal | None = None
        try:
            digest = await model.engine.weights_digest()
            if spec.weights_digest not in ("", digest):
                raise WeightsDiffer(f"the loaded weights have the digest {digest}, but the snapshot names {spec.weights_digest}")
            data = await asyncio.to_thread(_without_overlong, spec.config, model.text, data)
            rows = data.rows
            inputs = await asyncio.to_thread(inputs_of, spec, digest, data)
            if spec.scores and not spec.restart and (ended := scores.ended(spec.scores, inputs)):
                _report("end", **ended)
                return 0
            journal = Journal.open(spec.journal, inputs, restart=spec.restart)
            self._dropped = data.dropped
            _report(
                "begin", rows=len(rows), samples=spec.samples, kept=len(journal.done), model_digest=digest, journal=spec.journal
            )
            interrupted = await self._sample(model, rows, journal)
            if interrupted:
                _report("interrupted", rows=len(journal.done), of=len(rows), journal=spec.journal)
                return EXIT_INTERRUPTED
            await asyncio.to_thread(self._finish, journal, rows, digest, inputs)
            return 0
        finally:
            if journal is not None:
                journal.close()
            await model.engine.shutdown()

    async def _sample(self, model: Any, rows: list[bytes], journal: Journal) -> bool:
        """Returns whether the batch was stopped before it finished."""
        from rollout_workers.data.prompts import PromptReader
        from rollout_workers.environments import registry
        from rollout_workers.environments.episode import EpisodeRunner
        from rollout_workers.environments.limits import Limits
        from rollout_workers.inference.params import of_run
        from rollout_workers.offline.sampling import Tally, sample

        spec, config = self._spec, self._spec.config
        prompts = PromptReader.of_samples(config, model.text)
        if not spec.allow_failures:
            await asyncio.to_thread(_check_prompts, prompts, rows, config.engine.max_model_len)
        if len(journal.done) == len(rows):
            return False
        rewards = _rewards(spec, model.text.eos_id)
        try:
            if rewards is not None:
                await rewards.start()
            context = registry.Context(config, prompts, rewards, model.text, spec.base_dir)
            async with registry.opened(context) as environment:
                runner = EpisodeRunner(
                    model.engine, environment, model.text, of_run(config.sampling),
                    limits=Limits.of(config), chat=config.model.chat_template,
                )  # fmt: skip

                def report(tally: Tally) -> None:
                    _report(
                        "progress", rows=tally.rows, of=len(rows), samples=tally.samples, tokens=tally.tokens,
                        seconds=round(tally.seconds, 3), mean_score=tally.mean, failures=dict(tally.failures),
                        retries=rewards.retries if rewards is not None else 0,
                    )  # fmt: skip

                await sample(
                    runner, rows, journal, seed=config.seed, samples=spec.samples, slots=config.engine.slots,
                    scores=rewarded(config), stop=self._stop, report=report,
                )  # fmt: skip
        finally:
            if rewards is not None:
                await rewards.close()
        return self._stop.is_set() and len(journal.done) < len(rows)

    def _finish(self, journal: Journal, rows: list[bytes], digest: str, inputs: dict[str, Any]) -> None:
        """Write the output and log a summary. Failures prevent the output unless they are
        allowed."""
        spec = self._spec
        statuses, failures = Counter[str](), Counter[str]()
        tokens, scored, total = 0, 0, 0.0
        for row in range(len(rows)):
            for one in journal.samples(row):
                statuses[one["status"]] += 1
                tokens += one["completion_tokens"]
                if one["status"] == "INFRA_FAILED":
                    failures[one["reason"]] += 1
                if one["score"] is not None:
                    scored, total = scored + 1, total + one["score"]
        if failures and not spec.allow_failures:
            counted = ", ".join(f"{reason} {count}" for reason, count in sorted(failures.items()))
            raise SamplesFailed(
                f"{failures.total()} of {statuses.total()} samples are INFRA_FAILED ({counted}): {spec.output} was not written",
                fix="run the same command again, which retries failed rows; --allow-failures writes them without a score",
            )
        output.write(spec.output, _records(journal, rows, digest), inputs)
        end = {
            "output": spec.output, "rows": len(rows), "dropped": self._dropped,
            "samples": statuses.total(), "tokens": tokens, "statuses": dict(statuses),
            "failures": dict(failures), "mean_score": total / scored if scored else None, "model_digest": digest,
        }  # fmt: skip
        if spec.scores:
            of_rows = (scores.of_row(row, rows[row], journal.samples(row), spec.cluster) for row in range(len(rows)))
            scores.write(spec.scores, inputs, end, of_rows)
        journal.remove()
        _report("end", **end)


def _records(journal: Journal, rows: list[bytes], digest: str) -> Iterator[output.Record]:
    for row, row_json in enumerate(rows):
        data = json.loads(row_json)
        for one in journal.samples(row):
            yield {"row": row, **one, "model_digest": digest, "data": data}


def _load(spec: BatchSpec) -> Any:
    """The engine and the tokenizer. Blocks. Raises :class:`MissingFile`, :class:`BadModel`."""
    from rollout_workers.inference.model import load

    worker = WorkerSpec(base_dir=spec.base_dir, initial_weights=spec.model, threads=spec.threads)
    worker.plan.config.CopyFrom(spec.config)
    try:
        return load(worker)
    except FileNotFoundError as error:
        raise MissingFile(str(error), fix="pass the folder of a model") from error
    except Exception as error:
        raise BadModel(f"can't load {spec.model}: {error}", fix="pass a folder in the Hugging Face layout") from error


def _with_model(spec: BatchSpec) -> BatchSpec:
    """The spec with a folder for a model of the hub. Raises :class:`SourceError`."""
    if os.path.isdir(spec.model) or not hub.is_name(spec.model, spec.base_dir):
        return spec
    folder, _ = hub.model(spec.model)
    spec.config.model.path = folder
    return replace(spec, model=folder)


def _without_overlong(config: RunConfig, text: Any, data: Dataset) -> Dataset:
    """The rows whose prompts leave room for a completion, if `data.overlong` is "drop"."""
    from rollout_workers.data.prompts import Prompt, PromptReader, longest_prompt

    if config.data.overlong != "drop":
        return data
    prompts = PromptReader.of_rows(config, text).read(data.rows)
    longest = longest_prompt(config)
    fits = [not isinstance(prompt, Prompt) or len(prompt.token_ids) <= longest for prompt in prompts]
    rows = [row for row, fit in zip(data.rows, fits, strict=True) if fit]
    if not rows:
        raise BadPrompt(f"each of the {len(fits)} prompts has more than {longest} tokens", fix="lower `--max-tokens`")
    return replace(data, rows=rows, dropped=len(fits) - len(rows))


def _check_prompts(prompts: Any, rows: list[bytes], longest: int) -> None:
    """Raises :class:`BadPrompt` with the first rows that can't be answered."""
    wrong: list[str] = []
    fix = ""
    for row, prompt in enumerate(prompts.read(rows)):
        if isinstance(prompt, RolloutError):
            problem, fix = prompt.message, fix or prompt.fix
        elif len(prompt.token_ids) >= longest:
            problem = f"a prompt of {len(prompt.token_ids)} tokens leaves no room in a context of {longest}"
            fix = fix or 'raise `engine.max_model_len`, or set `data.overlong` to "drop" or "truncate"'
        else:
            continue
        wrong.append(f"row {row}: {problem}")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise BadPrompt(
            f"{len(wrong)} of {len(rows)} rows can't be answered: {'; '.join(wrong[:_SHOWN])}{more}",
            fix=f"{fix}; --allow-failures leaves them as INFRA_FAILED",
        )


def _rewards(spec: BatchSpec, end: int | None) -> Any:
    """The scorer of completions; None without ``[reward]``."""
    from rollout_workers.offline.scored_here import RewardModelHere
    from rollout_workers.rewards.config import models_of, scorer_of

    reward = spec.config.reward
    if not spec.config.HasField("reward"):
        return None
    models = models_of(reward)
    return scorer_of(reward, spec.base_dir, lambda number: RewardModelHere(models[number], spec.base_dir, end), evaluates=True)
