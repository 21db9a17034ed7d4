"""Checks that an engine can generate a prompt's responses and that a message can deliver them.

Every prompt passes here: submitted messages, lines of files, sources. A checked prompt has the types that
``dora.data.types.Prompt`` declares, within bounds. Sizes are checked before anything is decoded.
"""

from collections.abc import Sequence
from dataclasses import replace

from dora.config import Config
from dora.data.limits import GROUP_SIZE_MAX, SAMPLING_BYTES_MAX, TEXT_BYTES_MAX, check_size_min
from dora.data.sampling import check_sampling, checked_overrides
from dora.data.strict_json import read_json
from dora.data.types import Prompt, RoutingShape, SamplingParams
from dora.errors import MISSING, InvalidValue
from dora.orchestrator.rollout.responses.buffer import sampling_of
from dora.prompts.check import check_name, check_priority, check_size, check_verifier, checked_messages
from dora.prompts.tokenizer import ChatTokenizer
from dora.rpc import dora_pb2 as pb
from dora.rpc.convert import TOKEN_ID_BYTES, token_ids_from_wire, trajectory_bytes_most


class PromptCheck:
    """Checks prompts by a service's configuration, vocabulary and tokenizer."""

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: ChatTokenizer | None = None,
        vocab_size: int = 0,
        routing: RoutingShape | None = None,
    ) -> None:
        self._config = config
        self._routing = routing
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def from_wire(self, message: pb.Prompt) -> Prompt:
        """Returns a submitted prompt, checked. The model's tokenizer encodes a text or a chat here.

        Raises InvalidValue, with the field and the reason.
        """
        check_name(message.prompt_id, "prompt_id")
        position = f"prompt {message.prompt_id}"
        sampling_json = message.sampling_json or "{}"
        overrides = read_json(sampling_json, f"{position}: sampling_json", SAMPLING_BYTES_MAX)
        text, token_ids = self._tokens(message, position)
        return self.checked(
            Prompt(
                prompt_id=message.prompt_id,
                task_id=message.task_id,
                token_ids=token_ids,
                text=text,
                group_size=message.group_size,
                sampling=overrides,
                verifier_json=message.verifier_json or "{}",
                priority=message.priority,
                environment=message.environment,
                group_size_min=message.group_size_min,
            )
        )

    def checked(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with its group sizes filled in and the declared types.

        Raises InvalidValue if it is malformed, or no engine could generate it.
        """
        return self._checked(prompt, whatever_length=False)

    def well_formed(self, prompt: Prompt) -> Prompt:
        """Does the same as :meth:`checked`, for any length."""
        return self._checked(prompt, whatever_length=True)

    def _checked(self, prompt: Prompt, *, whatever_length: bool) -> Prompt:
        if not isinstance(prompt, Prompt):
            raise InvalidValue("prompt", prompt, "a dora.Prompt")
        check_name(prompt.prompt_id, "prompt_id")
        position = f"prompt {prompt.prompt_id}"
        if prompt.task_id != "":
            check_name(prompt.task_id, f"{position}: task_id")
        check_size(prompt.text, f"{position}: text", TEXT_BYTES_MAX)
        check_verifier(prompt.verifier_json, position, self._config.prompts.verifier_kb)
        check_priority(prompt.priority, f"{position}: priority")
        if prompt.environment != "":
            check_name(prompt.environment, f"{position}: environment")
        group_size = prompt.group_size or self._config.rollout.group_size
        if type(group_size) is not int or not 1 <= group_size <= GROUP_SIZE_MAX:
            raise InvalidValue(f"{position}: group_size", group_size, f"a whole number from 1 to {GROUP_SIZE_MAX}")
        check_size_min(prompt.group_size_min, group_size, f"{position}: group_size_min")
        at_once = prompt.group_size_min or min(self._config.rollout.group_size_min, group_size) or group_size
        overrides = checked_overrides(prompt.sampling, f"{position}: sampling")
        sampling = sampling_of(self._config.rollout, replace(prompt, sampling=overrides))
        check_sampling(sampling, f"{position}: sampling", self._vocab_size)
        if not whatever_length:  # before each of its ids is checked
            self._check_length(prompt.token_ids, sampling, position)
        token_ids = () if prompt.environment and not prompt.token_ids else self._checked_ids(prompt.token_ids, position)
        return replace(prompt, token_ids=token_ids, group_size=group_size, group_size_min=at_once, sampling=overrides)

    def _tokens(self, message: pb.Prompt, position: str) -> tuple[str, tuple[int, ...]]:
        forms = [name for name in ("token_ids", "messages_json") if getattr(message, name)]
        if len(forms) == 2:
            raise InvalidValue(
                f"{position}: token_ids, messages_json", "both", "one of token_ids, messages_json or text"
            )
        if forms == ["token_ids"]:
            limit = self._config.workers.context_tokens
            # checked before decoding, which takes nine times the memory
            if len(message.token_ids) // TOKEN_ID_BYTES >= limit:
                raise InvalidValue(
                    f"{position}: tokens",
                    len(message.token_ids) // TOKEN_ID_BYTES,
                    f"below workers.max_model_len_tokens {limit}",
                )
            return message.text, token_ids_from_wire(message.token_ids, f"{position}: token_ids")
        if not message.text and not message.messages_json:
            if message.environment:
                return "", ()
            raise InvalidValue(
                f"{position}: token_ids",
                MISSING,
                "at least one token, or text, messages_json or an environment that gives the prompt",
            )
        if self._tokenizer is None:
            raise InvalidValue(f"{position}: token_ids", MISSING, "at least one token: this service has no tokenizer")
        if message.messages_json:
            messages = read_json(message.messages_json, f"{position}: messages_json", TEXT_BYTES_MAX)
            return self._tokenizer.encode_chat(checked_messages(messages, f"{position}: messages_json"))
        check_size(message.text, f"{position}: text", TEXT_BYTES_MAX)
        return message.text, self._tokenizer.encode(message.text)

    def _check_length(self, token_ids: Sequence[int], sampling: SamplingParams, position: str) -> None:
        length, limit = len(token_ids), self._config.workers.context_tokens
        if sampling.max_tokens >= limit:  # no prompt would be short enough
            allowed = f"at most {limit - 1}, below workers.max_model_len_tokens {limit}"
            raise InvalidValue(f"{position}: sampling.max_tokens", sampling.max_tokens, allowed)
        if length + sampling.max_tokens > limit:
            raise InvalidValue(
                f"{position}: tokens",
                length,
                f"at most {limit - sampling.max_tokens}: workers.max_model_len_tokens {limit} "
                f"less max_tokens {sampling.max_tokens}",
            )
        most = trajectory_bytes_most(length, sampling.max_tokens, self._routing)
        limit_bytes = self._config.service.max_message_bytes
        if most > limit_bytes:  # it could be generated but not delivered
            allowed = f"such that a trajectory fits into service.max_message_bytes {limit_bytes}: it may take {most}"
            raise InvalidValue(f"{position}: sampling.max_tokens", sampling.max_tokens, allowed)

    def _checked_ids(self, token_ids: Sequence[int], position: str) -> tuple[int, ...]:
        """Returns plain integers within the vocabulary. Raises InvalidValue for the first that is not."""
        end = self._vocab_size or 1 << 31
        if not token_ids:
            raise InvalidValue(f"{position}: token_ids", MISSING, "at least one token")
        if set(map(type, token_ids)) != {int} or min(token_ids) < 0 or max(token_ids) >= end:  # fast for long prompts
            wrong = next(each for each in token_ids if type(each) is not int or not 0 <= each < end)
            raise InvalidValue(f"{position}: token_ids", wrong, f"whole numbers from 0 to {end - 1}")
        return tuple(token_ids)
