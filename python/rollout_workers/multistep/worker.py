"""The rollout worker of policies that act in environments."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rollout_workers.multistep.channel import Exchange
from rollout_workers.multistep.errors import BatchInvalid, EnvironmentSilent, SettingsInvalid
from rollout_workers.multistep.merging import merge, rows_of
from rollout_workers.multistep.policy import Policy, Prediction, load_policy, rows_of_actions
from rollout_workers.multistep.ranks import Peer, channel_key
from rollout_workers.multistep.settings import read_settings
from rollout_workers.multistep.weights import Receipt, WeightSource, load_strictly

Mode = Literal["train", "eval"]


class MultiStepRolloutWorker:
    """Receives batches of observations from environment ranks, asks the policy for chunks of
    actions, and sends them back.

    Its methods have the names, the parameters, and the results of RLinf 0.2's worker for Hugging
    Face models; docs/multistep.md lists what differs. A worker belongs to one event loop.
    """

    def __init__(self, cfg: Mapping[str, Any]):
        """Read the config. Raises :class:`SettingsInvalid`."""
        self.cfg = cfg
        self.settings = read_settings(cfg)
        self.receipt: Receipt | None = None
        self._policy: Policy | None = None
        self._arrived: dict[str, list[Any]] = {mode: [] for mode in self.settings.peers}
        self._weights: WeightSource | None = None

    def init_worker(self, policy: Policy | None = None, weights: WeightSource | None = None) -> None:
        """Take the policy, or load it from ``rollout.model.model_path``. weights: where
        :meth:`sync_model_from_actor` receives from."""
        if policy is None:
            if not self.settings.model_path:
                raise SettingsInvalid("rollout.model.model_path is missing, and init_worker got no policy")
            policy = load_policy(
                self.settings.model_path, device=self.settings.device, trust_remote_code=self.settings.trust_remote_code
            )
        self._policy, self._weights = policy, weights

    @property
    def hf_model(self) -> Any:
        """The policy."""
        if self._policy is None:
            raise SettingsInvalid("the worker has no policy", fix="call init_worker() first")
        return self._policy

    @property
    def version(self) -> int:
        """The version of the weights that the last sync loaded; 0 before it."""
        return self.receipt.version if self.receipt else 0

    async def recv_env_output(self, input_channel: Exchange, mode: Mode = "train") -> dict[str, Any]:
        """Receive one batch from each mapped environment rank, in order of ranks, and merge them
        (:func:`merge`). A call that is cancelled or raises :class:`EnvironmentSilent` loses
        nothing: the next one continues with the rank that it waited for. Raises
        :class:`BatchInvalid`, after which the batches of all ranks are dropped."""
        peers = self._peers(mode)
        arrived = self._arrived[mode]
        for peer in peers[len(arrived) :]:
            arrived.append(await self._receive(input_channel, peer, mode))
        self._arrived[mode] = []
        for peer, batch in zip(peers, arrived, strict=True):
            if (rows := rows_of(batch, peer.rank)) != peer.rows:
                raise BatchInvalid(
                    f"env rank {peer.rank} sent {rows} rows, not {peer.rows}", fix=f"check env.{mode}.total_num_envs"
                )
        return merge(arrived, [peer.rank for peer in peers])

    def drop_received(self, mode: Mode = "train") -> None:
        """Forget the batches that a call which raised :class:`EnvironmentSilent` had received."""
        self._arrived[mode] = []

    async def _receive(self, channel: Exchange, peer: Peer, mode: Mode) -> Any:
        key, limit = channel_key(peer.rank, self.settings.rank, mode), self.settings.receive_timeout_seconds
        try:
            async with asyncio.timeout(limit):
                return await channel.get(key)
        except TimeoutError as error:
            raise EnvironmentSilent(
                f"env rank {peer.rank} sent nothing to rollout rank {self.settings.rank} for {limit:g} s (key {key})",
                fix="check the environment worker, or raise rollout.receive_timeout_seconds",
            ) from error

    def predict(self, env_obs: Mapping[str, Any], mode: Mode = "train") -> tuple[Any, Prediction]:
        """Ask the policy for actions, without gradients."""
        with torch.no_grad():
            return self.hf_model.predict_action_batch(env_obs=env_obs, mode=mode)

    def get_dones_and_rewards(self, env_output: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """The dones, bool [B, C], and the rewards, float [B, C] or ``None``, of a merged batch.

        With ``env.train.auto_reset`` and a policy that has values, ``gamma`` times the value of
        ``final_obs`` is added to the last reward of the rows whose last step was truncated
        (``algorithm.bootstrap_type`` is ``standard``) or done (any other). The batch does not
        change. Raises :class:`BatchInvalid`.
        """
        dones = _given(env_output, "dones").bool().cpu().contiguous()
        if env_output.get("rewards") is None:
            return dones, None
        rewards = env_output["rewards"].cpu().contiguous()
        ended = dones
        if self.settings.bootstrap_type == "standard":
            ended = _given(env_output, "truncations").bool().cpu()
        bootstrapped = ended[:, -1]
        if not self.settings.auto_reset or not bootstrapped.any() or not self._has_values():
            return dones, rewards
        if not rewards.is_floating_point():
            raise BatchInvalid(f"rewards are {rewards.dtype}, to which no value can be added", fix="send them as float32")
        values = self._values(_given(env_output, "final_obs"))
        rewards = rewards.clone()
        rewards[:, -1] += self.settings.gamma * torch.where(bootstrapped, values, torch.zeros_like(values))
        return dones, rewards

    def _has_values(self) -> bool:
        return hasattr(self.hf_model, "value_head") or hasattr(self.hf_model, "q_head")

    def _values(self, observations: Mapping[str, Any]) -> Tensor:
        actions, prediction = self.predict(observations)
        if "prev_values" in prediction:
            return prediction["prev_values"][:, 0].cpu()
        return torch.zeros(rows_of_actions(actions))

    def send_chunk_actions(
        self,
        output_channel: Exchange,
        chunk_actions: Tensor | np.ndarray[Any, Any],
        mode: Mode = "train",
    ) -> None:
        """Send each mapped environment rank its rows, in order. Tensors are sent from the CPU and
        without gradients. Raises :class:`BatchInvalid` before anything is sent."""
        peers = self._peers(mode)
        rows, wanted = rows_of_actions(chunk_actions), sum(peer.rows for peer in peers)
        if rows != wanted:
            split = ", ".join(f"{peer.rows} of env rank {peer.rank}" for peer in peers)
            raise BatchInvalid(f"chunk actions have {rows} rows, not {wanted} ({split})")
        if isinstance(chunk_actions, Tensor):
            chunk_actions = chunk_actions.detach().cpu()
        first = 0
        for peer in peers:
            output_channel.put(chunk_actions[first : first + peer.rows], channel_key(self.settings.rank, peer.rank, mode))
            first += peer.rows

    async def sync_model_from_actor(self) -> None:
        """Wait for weights of the actor, load them strictly, and record their version and digest in
        ``receipt``. Raises :class:`WeightsMismatch`."""
        if self._weights is None:
            raise SettingsInvalid("the worker has no source of weights", fix="call init_worker(weights=...)")
        policy = self.hf_model
        if not isinstance(policy, nn.Module):
            raise SettingsInvalid(f"the policy is a {type(policy).__name__}, not a torch module, and can't load weights")
        weights = await self._weights.receive()
        self.receipt = await asyncio.to_thread(load_strictly, policy, weights)

    def _peers(self, mode: str) -> tuple[Peer, ...]:
        if mode not in self.settings.peers:
            modes = " and ".join(self.settings.peers)
            raise SettingsInvalid(f"the mode is {mode!r}, and the config has {modes}", fix="set env.eval.total_num_envs for eval")
        return self.settings.peers[mode]


def _given(env_output: Mapping[str, Any], field: str) -> Any:
    if env_output.get(field) is None:
        raise BatchInvalid(f"`{field}` of the batch is None")
    return env_output[field]
