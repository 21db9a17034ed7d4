from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChallengeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChallengeReply(_message.Message):
    __slots__ = ("nonce", "proofs")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOFS_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    proofs: _containers.RepeatedCompositeFieldContainer[ServiceProof]
    def __init__(self, nonce: _Optional[bytes] = ..., proofs: _Optional[_Iterable[_Union[ServiceProof, _Mapping]]] = ...) -> None: ...

class ServiceProof(_message.Message):
    __slots__ = ("holder", "proof")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    holder: str
    proof: bytes
    def __init__(self, holder: _Optional[str] = ..., proof: _Optional[bytes] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("groups_per_step", "client_name", "take_over", "client_id")
    GROUPS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    groups_per_step: int
    client_name: str
    take_over: bool
    client_id: bytes
    def __init__(self, groups_per_step: _Optional[int] = ..., client_name: _Optional[str] = ..., take_over: _Optional[bool] = ..., client_id: _Optional[bytes] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("trainer_epoch", "next_step", "groups_per_step", "window_versions", "model", "store_folder", "store_proof", "store_proof_bytes", "max_message_bytes", "reference_version", "tensors", "takes_images")
    TRAINER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    WINDOW_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STORE_FOLDER_FIELD_NUMBER: _ClassVar[int]
    STORE_PROOF_FIELD_NUMBER: _ClassVar[int]
    STORE_PROOF_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TAKES_IMAGES_FIELD_NUMBER: _ClassVar[int]
    trainer_epoch: int
    next_step: int
    groups_per_step: int
    window_versions: int
    model: str
    store_folder: str
    store_proof: str
    store_proof_bytes: bytes
    max_message_bytes: int
    reference_version: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorHeader]
    takes_images: bool
    def __init__(self, trainer_epoch: _Optional[int] = ..., next_step: _Optional[int] = ..., groups_per_step: _Optional[int] = ..., window_versions: _Optional[int] = ..., model: _Optional[str] = ..., store_folder: _Optional[str] = ..., store_proof: _Optional[str] = ..., store_proof_bytes: _Optional[bytes] = ..., max_message_bytes: _Optional[int] = ..., reference_version: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorHeader, _Mapping]]] = ..., takes_images: _Optional[bool] = ...) -> None: ...

class TensorHeader(_message.Message):
    __slots__ = ("name", "dtype", "shape", "optional")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    optional: bool
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., optional: _Optional[bool] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("trainer_epoch", "client_name", "client_id")
    TRAINER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    trainer_epoch: int
    client_name: str
    client_id: bytes
    def __init__(self, trainer_epoch: _Optional[int] = ..., client_name: _Optional[str] = ..., client_id: _Optional[bytes] = ...) -> None: ...

class KeepAliveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StreamStepRequest(_message.Message):
    __slots__ = ("trainer_epoch", "step", "packed")
    TRAINER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    trainer_epoch: int
    step: int
    packed: bool
    def __init__(self, trainer_epoch: _Optional[int] = ..., step: _Optional[int] = ..., packed: _Optional[bool] = ...) -> None: ...

class TrajectoryBatch(_message.Message):
    __slots__ = ("step", "groups", "end_of_prompts", "packed", "tokens", "ended")
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    END_OF_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    step: int
    groups: _containers.RepeatedCompositeFieldContainer[TrajectoryGroup]
    end_of_prompts: bool
    packed: _containers.RepeatedCompositeFieldContainer[PackedGroup]
    tokens: bytes
    ended: str
    def __init__(self, step: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[TrajectoryGroup, _Mapping]]] = ..., end_of_prompts: _Optional[bool] = ..., packed: _Optional[_Iterable[_Union[PackedGroup, _Mapping]]] = ..., tokens: _Optional[bytes] = ..., ended: _Optional[str] = ...) -> None: ...

class TrajectoryGroup(_message.Message):
    __slots__ = ("group_id", "trajectories", "continues")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    trajectories: _containers.RepeatedCompositeFieldContainer[Trajectory]
    continues: bool
    def __init__(self, group_id: _Optional[str] = ..., trajectories: _Optional[_Iterable[_Union[Trajectory, _Mapping]]] = ..., continues: _Optional[bool] = ...) -> None: ...

class PackedGroup(_message.Message):
    __slots__ = ("group_id", "prompt_id", "task_id", "group_size", "behaviour_version", "reference_version", "trained_step", "window_versions", "prompt_token_ids", "sampling", "seeds", "trajectory_ids", "sample_indexes", "length_tokens", "rewards", "rewards_valid", "reward_components", "verifier_logs", "finish_reasons", "stop_reasons", "started_at", "finished_at", "segments", "worker_history")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOUR_VERSION_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAINED_STEP_FIELD_NUMBER: _ClassVar[int]
    WINDOW_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEXES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    REWARDS_VALID_FIELD_NUMBER: _ClassVar[int]
    REWARD_COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_LOGS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASONS_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_HISTORY_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    prompt_id: str
    task_id: str
    group_size: int
    behaviour_version: int
    reference_version: int
    trained_step: int
    window_versions: int
    prompt_token_ids: bytes
    sampling: Sampling
    seeds: _containers.RepeatedScalarFieldContainer[int]
    trajectory_ids: _containers.RepeatedScalarFieldContainer[str]
    sample_indexes: _containers.RepeatedScalarFieldContainer[int]
    length_tokens: _containers.RepeatedScalarFieldContainer[int]
    rewards: _containers.RepeatedScalarFieldContainer[float]
    rewards_valid: _containers.RepeatedScalarFieldContainer[bool]
    reward_components: _containers.RepeatedCompositeFieldContainer[RewardComponents]
    verifier_logs: _containers.RepeatedScalarFieldContainer[str]
    finish_reasons: _containers.RepeatedScalarFieldContainer[str]
    stop_reasons: _containers.RepeatedCompositeFieldContainer[StopReason]
    started_at: _containers.RepeatedScalarFieldContainer[float]
    finished_at: _containers.RepeatedScalarFieldContainer[float]
    segments: _containers.RepeatedScalarFieldContainer[int]
    worker_history: _containers.RepeatedCompositeFieldContainer[Segment]
    def __init__(self, group_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., task_id: _Optional[str] = ..., group_size: _Optional[int] = ..., behaviour_version: _Optional[int] = ..., reference_version: _Optional[int] = ..., trained_step: _Optional[int] = ..., window_versions: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., seeds: _Optional[_Iterable[int]] = ..., trajectory_ids: _Optional[_Iterable[str]] = ..., sample_indexes: _Optional[_Iterable[int]] = ..., length_tokens: _Optional[_Iterable[int]] = ..., rewards: _Optional[_Iterable[float]] = ..., rewards_valid: _Optional[_Iterable[bool]] = ..., reward_components: _Optional[_Iterable[_Union[RewardComponents, _Mapping]]] = ..., verifier_logs: _Optional[_Iterable[str]] = ..., finish_reasons: _Optional[_Iterable[str]] = ..., stop_reasons: _Optional[_Iterable[_Union[StopReason, _Mapping]]] = ..., started_at: _Optional[_Iterable[float]] = ..., finished_at: _Optional[_Iterable[float]] = ..., segments: _Optional[_Iterable[int]] = ..., worker_history: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ...) -> None: ...

class RewardComponents(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    def __init__(self, values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class StopReason(_message.Message):
    __slots__ = ("stop_string", "stop_token_id")
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    stop_string: str
    stop_token_id: int
    def __init__(self, stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("trajectory_id", "group_id", "prompt_id", "task_id", "sample_index", "group_size", "behaviour_version", "reference_version", "trained_step", "staleness", "prompt_token_ids", "response_token_ids", "logprobs", "loss_mask", "sampling", "reward", "reward_valid", "reward_components", "verifier_log", "finish_reason", "started_at", "finished_at", "worker_history", "length_tokens", "events", "stop_string", "stop_token_id", "window_versions", "routed_experts", "turn_rewards", "turn_sampling", "branch_index", "shared_prefix_tokens")
    class RewardComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TurnRewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TurnSamplingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Sampling
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Sampling, _Mapping]] = ...) -> None: ...
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOUR_VERSION_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAINED_STEP_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_VALID_FIELD_NUMBER: _ClassVar[int]
    REWARD_COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_LOG_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    WORKER_HISTORY_FIELD_NUMBER: _ClassVar[int]
    LENGTH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    WINDOW_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TURN_REWARDS_FIELD_NUMBER: _ClassVar[int]
    TURN_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    BRANCH_INDEX_FIELD_NUMBER: _ClassVar[int]
    SHARED_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    group_id: str
    prompt_id: str
    task_id: str
    sample_index: int
    group_size: int
    behaviour_version: int
    reference_version: int
    trained_step: int
    staleness: int
    prompt_token_ids: bytes
    response_token_ids: bytes
    logprobs: bytes
    loss_mask: bytes
    sampling: Sampling
    reward: float
    reward_valid: bool
    reward_components: _containers.ScalarMap[str, float]
    verifier_log: str
    finish_reason: str
    started_at: float
    finished_at: float
    worker_history: _containers.RepeatedCompositeFieldContainer[Segment]
    length_tokens: int
    events: _containers.RepeatedCompositeFieldContainer[EnvironmentEvent]
    stop_string: str
    stop_token_id: int
    window_versions: int
    routed_experts: RoutedExperts
    turn_rewards: _containers.ScalarMap[str, float]
    turn_sampling: _containers.MessageMap[str, Sampling]
    branch_index: int
    shared_prefix_tokens: int
    def __init__(self, trajectory_id: _Optional[str] = ..., group_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., task_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., group_size: _Optional[int] = ..., behaviour_version: _Optional[int] = ..., reference_version: _Optional[int] = ..., trained_step: _Optional[int] = ..., staleness: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., response_token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., loss_mask: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., reward: _Optional[float] = ..., reward_valid: _Optional[bool] = ..., reward_components: _Optional[_Mapping[str, float]] = ..., verifier_log: _Optional[str] = ..., finish_reason: _Optional[str] = ..., started_at: _Optional[float] = ..., finished_at: _Optional[float] = ..., worker_history: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., length_tokens: _Optional[int] = ..., events: _Optional[_Iterable[_Union[EnvironmentEvent, _Mapping]]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., window_versions: _Optional[int] = ..., routed_experts: _Optional[_Union[RoutedExperts, _Mapping]] = ..., turn_rewards: _Optional[_Mapping[str, float]] = ..., turn_sampling: _Optional[_Mapping[str, Sampling]] = ..., branch_index: _Optional[int] = ..., shared_prefix_tokens: _Optional[int] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("layers", "top_k", "id_bytes", "expert_ids")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_IDS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    top_k: int
    id_bytes: int
    expert_ids: bytes
    def __init__(self, layers: _Optional[int] = ..., top_k: _Optional[int] = ..., id_bytes: _Optional[int] = ..., expert_ids: _Optional[bytes] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids", "ignore_eos", "stop")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    stop: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., stop: _Optional[_Iterable[str]] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("worker", "first_token", "last_token", "arrival", "version")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    worker: str
    first_token: int
    last_token: int
    arrival: str
    version: int
    def __init__(self, worker: _Optional[str] = ..., first_token: _Optional[int] = ..., last_token: _Optional[int] = ..., arrival: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class EnvironmentEvent(_message.Message):
    __slots__ = ("position_token", "kind", "name", "content", "at")
    POSITION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    position_token: int
    kind: str
    name: str
    content: str
    at: float
    def __init__(self, position_token: _Optional[int] = ..., kind: _Optional[str] = ..., name: _Optional[str] = ..., content: _Optional[str] = ..., at: _Optional[float] = ...) -> None: ...

class WeightChunk(_message.Message):
    __slots__ = ("header", "content")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    header: WeightFileHeader
    content: bytes
    def __init__(self, header: _Optional[_Union[WeightFileHeader, _Mapping]] = ..., content: _Optional[bytes] = ...) -> None: ...

class WeightFileHeader(_message.Message):
    __slots__ = ("trainer_epoch", "version", "file_name", "file_bytes", "base_version", "base_blake3", "piece_bytes")
    TRAINER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_BLAKE3_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    trainer_epoch: int
    version: int
    file_name: str
    file_bytes: int
    base_version: int
    base_blake3: bytes
    piece_bytes: int
    def __init__(self, trainer_epoch: _Optional[int] = ..., version: _Optional[int] = ..., file_name: _Optional[str] = ..., file_bytes: _Optional[int] = ..., base_version: _Optional[int] = ..., base_blake3: _Optional[bytes] = ..., piece_bytes: _Optional[int] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("file_bytes",)
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    file_bytes: int
    def __init__(self, file_bytes: _Optional[int] = ...) -> None: ...

class WeightFile(_message.Message):
    __slots__ = ("name", "file_bytes", "blake3")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLAKE3_FIELD_NUMBER: _ClassVar[int]
    name: str
    file_bytes: int
    blake3: bytes
    def __init__(self, name: _Optional[str] = ..., file_bytes: _Optional[int] = ..., blake3: _Optional[bytes] = ...) -> None: ...

class Canary(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ...) -> None: ...

class CommitStepRequest(_message.Message):
    __slots__ = ("trainer_epoch", "step", "version", "files", "canary", "metrics", "waited_s", "replayed_groups")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TRAINER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    trainer_epoch: int
    step: int
    version: int
    files: _containers.RepeatedCompositeFieldContainer[WeightFile]
    canary: Canary
    metrics: _containers.ScalarMap[str, float]
    waited_s: float
    replayed_groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, trainer_epoch: _Optional[int] = ..., step: _Optional[int] = ..., version: _Optional[int] = ..., files: _Optional[_Iterable[_Union[WeightFile, _Mapping]]] = ..., canary: _Optional[_Union[Canary, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., waited_s: _Optional[float] = ..., replayed_groups: _Optional[_Iterable[str]] = ...) -> None: ...

class CommitStepReply(_message.Message):
    __slots__ = ("next_step", "groups_trained")
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_TRAINED_FIELD_NUMBER: _ClassVar[int]
    next_step: int
    groups_trained: int
    def __init__(self, next_step: _Optional[int] = ..., groups_trained: _Optional[int] = ...) -> None: ...

class RepublishVersionRequest(_message.Message):
    __slots__ = ("trainer_epoch", "version", "files", "canary")
    TRAINER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    trainer_epoch: int
    version: int
    files: _containers.RepeatedCompositeFieldContainer[WeightFile]
    canary: Canary
    def __init__(self, trainer_epoch: _Optional[int] = ..., version: _Optional[int] = ..., files: _Optional[_Iterable[_Union[WeightFile, _Mapping]]] = ..., canary: _Optional[_Union[Canary, _Mapping]] = ...) -> None: ...

class RepublishVersionReply(_message.Message):
    __slots__ = ("next_step",)
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    next_step: int
    def __init__(self, next_step: _Optional[int] = ...) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndReply(_message.Message):
    __slots__ = ("prompts_left",)
    PROMPTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    prompts_left: int
    def __init__(self, prompts_left: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("ids", "reason")
    IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[CancelOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[CancelOutcome, _Mapping]]] = ...) -> None: ...

class CancelOutcome(_message.Message):
    __slots__ = ("id", "state", "group_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    state: str
    group_id: str
    def __init__(self, id: _Optional[str] = ..., state: _Optional[str] = ..., group_id: _Optional[str] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("prompts",)
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    def __init__(self, prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ...) -> None: ...

class FrontHello(_message.Message):
    __slots__ = ("address", "secure", "leaving")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    address: str
    secure: bool
    leaving: bool
    def __init__(self, address: _Optional[str] = ..., secure: _Optional[bool] = ..., leaving: _Optional[bool] = ...) -> None: ...

class FrontNoted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("environment",)
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    environment: str
    def __init__(self, environment: _Optional[str] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("prompt", "again", "version")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    again: bool
    version: int
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., again: _Optional[bool] = ..., version: _Optional[int] = ...) -> None: ...

class FindSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class WithdrawRequest(_message.Message):
    __slots__ = ("prompt_id", "reason")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    reason: str
    def __init__(self, prompt_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class WithdrawReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("model", "newest_version", "versions", "max_model_len_tokens", "sampling", "window_wait")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    WINDOW_WAIT_FIELD_NUMBER: _ClassVar[int]
    model: str
    newest_version: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    max_model_len_tokens: int
    sampling: Sampling
    window_wait: WindowWait
    def __init__(self, model: _Optional[str] = ..., newest_version: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ..., max_model_len_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., window_wait: _Optional[_Union[WindowWait, _Mapping]] = ...) -> None: ...

class SessionTurn(_message.Message):
    __slots__ = ("session_id", "turn", "tokens", "begin", "ended")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    turn: int
    tokens: TurnTokens
    begin: SessionBegin
    ended: bool
    def __init__(self, session_id: _Optional[str] = ..., turn: _Optional[int] = ..., tokens: _Optional[_Union[TurnTokens, _Mapping]] = ..., begin: _Optional[_Union[SessionBegin, _Mapping]] = ..., ended: _Optional[bool] = ...) -> None: ...

class SessionBegin(_message.Message):
    __slots__ = ("group_id", "prompt_id", "task_id", "version", "prompt_token_ids", "prompt_text", "verifier_json", "earlier_token_ids", "given_name", "is_evaluation", "capability", "sampling_json")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_JSON_FIELD_NUMBER: _ClassVar[int]
    EARLIER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_NAME_FIELD_NUMBER: _ClassVar[int]
    IS_EVALUATION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_JSON_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    prompt_id: str
    task_id: str
    version: int
    prompt_token_ids: bytes
    prompt_text: str
    verifier_json: str
    earlier_token_ids: bytes
    given_name: str
    is_evaluation: bool
    capability: bytes
    sampling_json: str
    def __init__(self, group_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., task_id: _Optional[str] = ..., version: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., prompt_text: _Optional[str] = ..., verifier_json: _Optional[str] = ..., earlier_token_ids: _Optional[bytes] = ..., given_name: _Optional[str] = ..., is_evaluation: _Optional[bool] = ..., capability: _Optional[bytes] = ..., sampling_json: _Optional[str] = ...) -> None: ...

class TurnRequest(_message.Message):
    __slots__ = ("session_id", "turn", "given_token_ids", "max_tokens", "name", "after_turn", "first_token", "fork", "whole", "sampling_json", "prompt_logprobs", "capability")
    class Fork(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PLACE: _ClassVar[TurnRequest.Fork]
        PROMPT: _ClassVar[TurnRequest.Fork]
    PLACE: TurnRequest.Fork
    PROMPT: TurnRequest.Fork
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    GIVEN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_TURN_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_JSON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    turn: int
    given_token_ids: bytes
    max_tokens: int
    name: str
    after_turn: int
    first_token: int
    fork: TurnRequest.Fork
    whole: bool
    sampling_json: str
    prompt_logprobs: bool
    capability: bytes
    def __init__(self, session_id: _Optional[str] = ..., turn: _Optional[int] = ..., given_token_ids: _Optional[bytes] = ..., max_tokens: _Optional[int] = ..., name: _Optional[str] = ..., after_turn: _Optional[int] = ..., first_token: _Optional[int] = ..., fork: _Optional[_Union[TurnRequest.Fork, str]] = ..., whole: _Optional[bool] = ..., sampling_json: _Optional[str] = ..., prompt_logprobs: _Optional[bool] = ..., capability: _Optional[bytes] = ...) -> None: ...

class TurnTokens(_message.Message):
    __slots__ = ("first_token", "token_ids", "logprobs", "finish_reason", "stop", "earlier_token_ids", "prompt_logprobs")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    EARLIER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    token_ids: bytes
    logprobs: bytes
    finish_reason: str
    stop: str
    earlier_token_ids: bytes
    prompt_logprobs: bytes
    def __init__(self, first_token: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., finish_reason: _Optional[str] = ..., stop: _Optional[str] = ..., earlier_token_ids: _Optional[bytes] = ..., prompt_logprobs: _Optional[bytes] = ...) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("session_id", "reward", "components", "log", "turn_rewards", "is_cached", "is_warm", "capability")
    class ComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TurnRewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    TURN_REWARDS_FIELD_NUMBER: _ClassVar[int]
    IS_CACHED_FIELD_NUMBER: _ClassVar[int]
    IS_WARM_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    reward: float
    components: _containers.ScalarMap[str, float]
    log: str
    turn_rewards: _containers.ScalarMap[int, float]
    is_cached: bool
    is_warm: bool
    capability: bytes
    def __init__(self, session_id: _Optional[str] = ..., reward: _Optional[float] = ..., components: _Optional[_Mapping[str, float]] = ..., log: _Optional[str] = ..., turn_rewards: _Optional[_Mapping[int, float]] = ..., is_cached: _Optional[bool] = ..., is_warm: _Optional[bool] = ..., capability: _Optional[bytes] = ...) -> None: ...

class EndSessionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FailSessionRequest(_message.Message):
    __slots__ = ("session_id", "reason", "fault", "capability")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    reason: str
    fault: str
    capability: bytes
    def __init__(self, session_id: _Optional[str] = ..., reason: _Optional[str] = ..., fault: _Optional[str] = ..., capability: _Optional[bytes] = ...) -> None: ...

class FailSessionReply(_message.Message):
    __slots__ = ("replacement_id",)
    REPLACEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    replacement_id: str
    def __init__(self, replacement_id: _Optional[str] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("prompt_id", "task_id", "token_ids", "text", "group_size", "sampling_json", "verifier_json", "messages_json", "priority", "environment", "group_size_min")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_JSON_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_JSON_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_MIN_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    task_id: str
    token_ids: bytes
    text: str
    group_size: int
    sampling_json: str
    verifier_json: str
    messages_json: str
    priority: int
    environment: str
    group_size_min: int
    def __init__(self, prompt_id: _Optional[str] = ..., task_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., text: _Optional[str] = ..., group_size: _Optional[int] = ..., sampling_json: _Optional[str] = ..., verifier_json: _Optional[str] = ..., messages_json: _Optional[str] = ..., priority: _Optional[int] = ..., environment: _Optional[str] = ..., group_size_min: _Optional[int] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("accepted", "queue_free")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FREE_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    queue_free: int
    def __init__(self, accepted: _Optional[int] = ..., queue_free: _Optional[int] = ...) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("prompts", "version", "share", "name")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    version: int
    share: float
    name: str
    def __init__(self, prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ..., version: _Optional[int] = ..., share: _Optional[float] = ..., name: _Optional[str] = ...) -> None: ...

class EvaluationPart(_message.Message):
    __slots__ = ("evaluation_id", "version", "groups", "refused", "end")
    EVALUATION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    evaluation_id: str
    version: int
    groups: _containers.RepeatedCompositeFieldContainer[TrajectoryGroup]
    refused: _containers.RepeatedCompositeFieldContainer[RefusedPrompt]
    end: EvaluationEnd
    def __init__(self, evaluation_id: _Optional[str] = ..., version: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[TrajectoryGroup, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[RefusedPrompt, _Mapping]]] = ..., end: _Optional[_Union[EvaluationEnd, _Mapping]] = ...) -> None: ...

class RefusedPrompt(_message.Message):
    __slots__ = ("prompt_id", "reason")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    reason: str
    def __init__(self, prompt_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EvaluationEnd(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ExamineRequest(_message.Message):
    __slots__ = ("probe",)
    PROBE_FIELD_NUMBER: _ClassVar[int]
    probe: bool
    def __init__(self, probe: _Optional[bool] = ...) -> None: ...

class ExaminedHost(_message.Message):
    __slots__ = ("host", "trouble", "found", "clock_ahead_s", "clock_error_s", "load_s", "move_s", "moved_bytes", "kv_token_bytes", "workers_ready", "workers", "fetch_s", "fetched_bytes")
    HOST_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    CLOCK_AHEAD_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ERROR_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    MOVE_S_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_READY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    host: str
    trouble: str
    found: HostExamination
    clock_ahead_s: float
    clock_error_s: float
    load_s: float
    move_s: float
    moved_bytes: int
    kv_token_bytes: int
    workers_ready: int
    workers: int
    fetch_s: float
    fetched_bytes: int
    def __init__(self, host: _Optional[str] = ..., trouble: _Optional[str] = ..., found: _Optional[_Union[HostExamination, _Mapping]] = ..., clock_ahead_s: _Optional[float] = ..., clock_error_s: _Optional[float] = ..., load_s: _Optional[float] = ..., move_s: _Optional[float] = ..., moved_bytes: _Optional[int] = ..., kv_token_bytes: _Optional[int] = ..., workers_ready: _Optional[int] = ..., workers: _Optional[int] = ..., fetch_s: _Optional[float] = ..., fetched_bytes: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("period_ms", "only_new")
    PERIOD_MS_FIELD_NUMBER: _ClassVar[int]
    ONLY_NEW_FIELD_NUMBER: _ClassVar[int]
    period_ms: int
    only_new: bool
    def __init__(self, period_ms: _Optional[int] = ..., only_new: _Optional[bool] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("model", "uptime_s", "window_versions", "groups_per_step", "filling_step", "filling_left", "newest_version", "trainer", "versions", "workers", "counters", "steps", "draining", "prompts_queued", "dp_groups_to_add", "source_epoch", "source_index", "storage_faults", "kv_tier", "prompts_failed", "pools", "evaluations", "adaptive_window", "hosts", "drain", "evaluated", "trainer_stalled", "moves", "window_wait", "warnings", "prompts_total", "step_s", "fleet_advice", "agents_wait_s", "mismatches")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    WINDOW_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    FILLING_STEP_FIELD_NUMBER: _ClassVar[int]
    FILLING_LEFT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_QUEUED_FIELD_NUMBER: _ClassVar[int]
    DP_GROUPS_TO_ADD_FIELD_NUMBER: _ClassVar[int]
    SOURCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FAULTS_FIELD_NUMBER: _ClassVar[int]
    KV_TIER_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_WINDOW_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    TRAINER_STALLED_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_WAIT_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    FLEET_ADVICE_FIELD_NUMBER: _ClassVar[int]
    AGENTS_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    model: str
    uptime_s: float
    window_versions: int
    groups_per_step: int
    filling_step: int
    filling_left: int
    newest_version: int
    trainer: str
    versions: _containers.RepeatedCompositeFieldContainer[VersionStatus]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    counters: _containers.ScalarMap[str, float]
    steps: _containers.RepeatedCompositeFieldContainer[StepMetrics]
    draining: bool
    prompts_queued: int
    dp_groups_to_add: int
    source_epoch: int
    source_index: int
    storage_faults: _containers.RepeatedCompositeFieldContainer[StorageFault]
    kv_tier: KvTierStatus
    prompts_failed: str
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    evaluations: _containers.RepeatedCompositeFieldContainer[EvaluationStatus]
    adaptive_window: AdaptiveWindow
    hosts: _containers.RepeatedCompositeFieldContainer[HostStatus]
    drain: Draining
    evaluated: _containers.RepeatedCompositeFieldContainer[EvaluatedVersion]
    trainer_stalled: str
    moves: _containers.RepeatedCompositeFieldContainer[Move]
    window_wait: WindowWait
    warnings: _containers.RepeatedCompositeFieldContainer[LogLine]
    prompts_total: int
    step_s: float
    fleet_advice: FleetAdvice
    agents_wait_s: float
    mismatches: _containers.RepeatedCompositeFieldContainer[Mismatch]
    def __init__(self, model: _Optional[str] = ..., uptime_s: _Optional[float] = ..., window_versions: _Optional[int] = ..., groups_per_step: _Optional[int] = ..., filling_step: _Optional[int] = ..., filling_left: _Optional[int] = ..., newest_version: _Optional[int] = ..., trainer: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[VersionStatus, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, float]] = ..., steps: _Optional[_Iterable[_Union[StepMetrics, _Mapping]]] = ..., draining: _Optional[bool] = ..., prompts_queued: _Optional[int] = ..., dp_groups_to_add: _Optional[int] = ..., source_epoch: _Optional[int] = ..., source_index: _Optional[int] = ..., storage_faults: _Optional[_Iterable[_Union[StorageFault, _Mapping]]] = ..., kv_tier: _Optional[_Union[KvTierStatus, _Mapping]] = ..., prompts_failed: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., evaluations: _Optional[_Iterable[_Union[EvaluationStatus, _Mapping]]] = ..., adaptive_window: _Optional[_Union[AdaptiveWindow, _Mapping]] = ..., hosts: _Optional[_Iterable[_Union[HostStatus, _Mapping]]] = ..., drain: _Optional[_Union[Draining, _Mapping]] = ..., evaluated: _Optional[_Iterable[_Union[EvaluatedVersion, _Mapping]]] = ..., trainer_stalled: _Optional[str] = ..., moves: _Optional[_Iterable[_Union[Move, _Mapping]]] = ..., window_wait: _Optional[_Union[WindowWait, _Mapping]] = ..., warnings: _Optional[_Iterable[_Union[LogLine, _Mapping]]] = ..., prompts_total: _Optional[int] = ..., step_s: _Optional[float] = ..., fleet_advice: _Optional[_Union[FleetAdvice, _Mapping]] = ..., agents_wait_s: _Optional[float] = ..., mismatches: _Optional[_Iterable[_Union[Mismatch, _Mapping]]] = ...) -> None: ...

class Mismatch(_message.Message):
    __slots__ = ("version", "staleness", "kl", "ratio_outside", "tokens", "precision")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    KL_FIELD_NUMBER: _ClassVar[int]
    RATIO_OUTSIDE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    version: int
    staleness: int
    kl: float
    ratio_outside: float
    tokens: int
    precision: str
    def __init__(self, version: _Optional[int] = ..., staleness: _Optional[int] = ..., kl: _Optional[float] = ..., ratio_outside: _Optional[float] = ..., tokens: _Optional[int] = ..., precision: _Optional[str] = ...) -> None: ...

class WindowWait(_message.Message):
    __slots__ = ("waits_for", "reason", "group_id", "session_id", "environment", "since", "sessions_idle")
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_IDLE_FIELD_NUMBER: _ClassVar[int]
    waits_for: str
    reason: str
    group_id: str
    session_id: str
    environment: str
    since: float
    sessions_idle: int
    def __init__(self, waits_for: _Optional[str] = ..., reason: _Optional[str] = ..., group_id: _Optional[str] = ..., session_id: _Optional[str] = ..., environment: _Optional[str] = ..., since: _Optional[float] = ..., sessions_idle: _Optional[int] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("at", "level", "text")
    AT_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    at: float
    level: str
    text: str
    def __init__(self, at: _Optional[float] = ..., level: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("number", "at", "trajectory_id", "source", "target", "kind", "reason", "result")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    number: int
    at: float
    trajectory_id: str
    source: str
    target: str
    kind: str
    reason: str
    result: str
    def __init__(self, number: _Optional[int] = ..., at: _Optional[float] = ..., trajectory_id: _Optional[str] = ..., source: _Optional[str] = ..., target: _Optional[str] = ..., kind: _Optional[str] = ..., reason: _Optional[str] = ..., result: _Optional[str] = ...) -> None: ...

class EvaluatedVersion(_message.Message):
    __slots__ = ("version", "prompts", "missing", "refused", "reason", "begun_at", "ended_at", "responses", "reward_mean", "reward_error", "length_mean_tokens")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BEGUN_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    REWARD_ERROR_FIELD_NUMBER: _ClassVar[int]
    LENGTH_MEAN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    version: int
    prompts: int
    missing: int
    refused: int
    reason: str
    begun_at: float
    ended_at: float
    responses: int
    reward_mean: float
    reward_error: float
    length_mean_tokens: float
    def __init__(self, version: _Optional[int] = ..., prompts: _Optional[int] = ..., missing: _Optional[int] = ..., refused: _Optional[int] = ..., reason: _Optional[str] = ..., begun_at: _Optional[float] = ..., ended_at: _Optional[float] = ..., responses: _Optional[int] = ..., reward_mean: _Optional[float] = ..., reward_error: _Optional[float] = ..., length_mean_tokens: _Optional[float] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("ended", "waits_for", "remedy")
    ENDED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    ended: str
    waits_for: str
    remedy: str
    def __init__(self, ended: _Optional[str] = ..., waits_for: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class EvaluationStatus(_message.Message):
    __slots__ = ("evaluation_id", "name", "version", "share", "prompts", "prompts_done", "running", "waiting", "preempted", "asked_at", "idle")
    EVALUATION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_DONE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    ASKED_AT_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    evaluation_id: str
    name: str
    version: int
    share: float
    prompts: int
    prompts_done: int
    running: int
    waiting: int
    preempted: int
    asked_at: float
    idle: int
    def __init__(self, evaluation_id: _Optional[str] = ..., name: _Optional[str] = ..., version: _Optional[int] = ..., share: _Optional[float] = ..., prompts: _Optional[int] = ..., prompts_done: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., preempted: _Optional[int] = ..., asked_at: _Optional[float] = ..., idle: _Optional[int] = ...) -> None: ...

class AdaptiveWindow(_message.Message):
    __slots__ = ("min", "max", "last_change")
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    LAST_CHANGE_FIELD_NUMBER: _ClassVar[int]
    min: int
    max: int
    last_change: WindowChange
    def __init__(self, min: _Optional[int] = ..., max: _Optional[int] = ..., last_change: _Optional[_Union[WindowChange, _Mapping]] = ...) -> None: ...

class WindowChange(_message.Message):
    __slots__ = ("step", "before", "size", "reason")
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    step: int
    before: int
    size: int
    reason: str
    def __init__(self, step: _Optional[int] = ..., before: _Optional[int] = ..., size: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class FleetAdvice(_message.Message):
    __slots__ = ("act", "hosts", "hosts_wanted", "reason", "leave_first")
    ACT_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    HOSTS_WANTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIRST_FIELD_NUMBER: _ClassVar[int]
    act: bool
    hosts: int
    hosts_wanted: int
    reason: str
    leave_first: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, act: _Optional[bool] = ..., hosts: _Optional[int] = ..., hosts_wanted: _Optional[int] = ..., reason: _Optional[str] = ..., leave_first: _Optional[_Iterable[str]] = ...) -> None: ...

class HostStatus(_message.Message):
    __slots__ = ("name", "epoch", "state", "workers", "workers_ready", "device", "capacity", "versions", "reason", "seen_at", "pid", "zone", "leaves_in_s", "kind", "speed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_READY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SEEN_AT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    LEAVES_IN_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    state: str
    workers: int
    workers_ready: int
    device: str
    capacity: HostCapacity
    versions: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    seen_at: float
    pid: int
    zone: str
    leaves_in_s: float
    kind: str
    speed: float
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[str] = ..., workers: _Optional[int] = ..., workers_ready: _Optional[int] = ..., device: _Optional[str] = ..., capacity: _Optional[_Union[HostCapacity, _Mapping]] = ..., versions: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ..., seen_at: _Optional[float] = ..., pid: _Optional[int] = ..., zone: _Optional[str] = ..., leaves_in_s: _Optional[float] = ..., kind: _Optional[str] = ..., speed: _Optional[float] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("pool_id", "epoch", "state", "parked", "kv_tokens", "capacity_tokens", "memory_bytes", "memory_most_bytes", "spill_bytes", "spill_most_bytes", "pid", "host", "reason", "pinned_bytes")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPILL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPILL_MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    epoch: int
    state: str
    parked: int
    kv_tokens: int
    capacity_tokens: int
    memory_bytes: int
    memory_most_bytes: int
    spill_bytes: int
    spill_most_bytes: int
    pid: int
    host: str
    reason: str
    pinned_bytes: int
    def __init__(self, pool_id: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[str] = ..., parked: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., capacity_tokens: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., memory_most_bytes: _Optional[int] = ..., spill_bytes: _Optional[int] = ..., spill_most_bytes: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., reason: _Optional[str] = ..., pinned_bytes: _Optional[int] = ...) -> None: ...

class KvTierStatus(_message.Message):
    __slots__ = ("up", "used_bytes", "size_bytes", "chunks", "workers", "restarts", "reason")
    UP_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    up: bool
    used_bytes: int
    size_bytes: int
    chunks: int
    workers: int
    restarts: int
    reason: str
    def __init__(self, up: _Optional[bool] = ..., used_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., chunks: _Optional[int] = ..., workers: _Optional[int] = ..., restarts: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class StorageFault(_message.Message):
    __slots__ = ("place", "reason", "since")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    place: str
    reason: str
    since: float
    def __init__(self, place: _Optional[str] = ..., reason: _Optional[str] = ..., since: _Optional[float] = ...) -> None: ...

class VersionStatus(_message.Message):
    __slots__ = ("version", "deadline_step", "newest", "workers", "groups_open", "groups_finished", "requests_running", "requests_waiting", "state", "reason", "sessions_idle")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_STEP_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_OPEN_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_IDLE_FIELD_NUMBER: _ClassVar[int]
    version: int
    deadline_step: int
    newest: bool
    workers: int
    groups_open: int
    groups_finished: int
    requests_running: int
    requests_waiting: int
    state: str
    reason: str
    sessions_idle: int
    def __init__(self, version: _Optional[int] = ..., deadline_step: _Optional[int] = ..., newest: _Optional[bool] = ..., workers: _Optional[int] = ..., groups_open: _Optional[int] = ..., groups_finished: _Optional[int] = ..., requests_running: _Optional[int] = ..., requests_waiting: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., sessions_idle: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "epoch", "state", "version", "target_version", "running", "waiting", "slots", "kv_use", "tokens_per_s", "pid", "host", "reason", "tensor_parallel", "pipeline_parallel", "tokens_per_step", "kind", "speed")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_USE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    state: str
    version: int
    target_version: int
    running: int
    waiting: int
    slots: int
    kv_use: float
    tokens_per_s: float
    pid: int
    host: str
    reason: str
    tensor_parallel: int
    pipeline_parallel: int
    tokens_per_step: float
    kind: str
    speed: float
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[str] = ..., version: _Optional[int] = ..., target_version: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., slots: _Optional[int] = ..., kv_use: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., reason: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., tokens_per_step: _Optional[float] = ..., kind: _Optional[str] = ..., speed: _Optional[float] = ...) -> None: ...

class StepMetrics(_message.Message):
    __slots__ = ("step", "committed_at", "mean_reward", "staleness_mean", "staleness_max", "tokens", "metrics", "took_s", "waited_s", "staleness_groups", "parts_s")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class PartsSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    MEAN_REWARD_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MEAN_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MAX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    STALENESS_GROUPS_FIELD_NUMBER: _ClassVar[int]
    PARTS_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    committed_at: float
    mean_reward: float
    staleness_mean: float
    staleness_max: int
    tokens: int
    metrics: _containers.ScalarMap[str, float]
    took_s: float
    waited_s: float
    staleness_groups: _containers.RepeatedScalarFieldContainer[int]
    parts_s: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., committed_at: _Optional[float] = ..., mean_reward: _Optional[float] = ..., staleness_mean: _Optional[float] = ..., staleness_max: _Optional[int] = ..., tokens: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., took_s: _Optional[float] = ..., waited_s: _Optional[float] = ..., staleness_groups: _Optional[_Iterable[int]] = ..., parts_s: _Optional[_Mapping[str, float]] = ...) -> None: ...

class TrajectoriesRequest(_message.Message):
    __slots__ = ("state", "limit", "offset", "worker")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    state: str
    limit: int
    offset: int
    worker: str
    def __init__(self, state: _Optional[str] = ..., limit: _Optional[int] = ..., offset: _Optional[int] = ..., worker: _Optional[str] = ...) -> None: ...

class TrajectoriesReply(_message.Message):
    __slots__ = ("trajectories", "total")
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    trajectories: _containers.RepeatedCompositeFieldContainer[TrajectoryStatus]
    total: int
    def __init__(self, trajectories: _Optional[_Iterable[_Union[TrajectoryStatus, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class TrajectoryStatus(_message.Message):
    __slots__ = ("trajectory_id", "group_id", "prompt_id", "state", "version", "deadline_step", "worker", "tokens", "max_tokens", "age_s", "moves", "handoff", "target")
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_STEP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    group_id: str
    prompt_id: str
    state: str
    version: int
    deadline_step: int
    worker: str
    tokens: int
    max_tokens: int
    age_s: float
    moves: int
    handoff: str
    target: str
    def __init__(self, trajectory_id: _Optional[str] = ..., group_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., state: _Optional[str] = ..., version: _Optional[int] = ..., deadline_step: _Optional[int] = ..., worker: _Optional[str] = ..., tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., age_s: _Optional[float] = ..., moves: _Optional[int] = ..., handoff: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...

class ShowTrajectoryRequest(_message.Message):
    __slots__ = ("trajectory_id", "first_token", "tokens")
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    first_token: int
    tokens: int
    def __init__(self, trajectory_id: _Optional[str] = ..., first_token: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class ShownTrajectory(_message.Message):
    __slots__ = ("status", "task_id", "sample_index", "started_at", "finished_at", "finish_reason", "reward", "reward_components", "verifier_log", "turn_rewards", "worker_history", "turns", "prompt_tokens", "total_tokens", "first_token", "token_ids", "logprobs", "is_sampled", "arrivals")
    class RewardComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TurnRewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_LOG_FIELD_NUMBER: _ClassVar[int]
    TURN_REWARDS_FIELD_NUMBER: _ClassVar[int]
    WORKER_HISTORY_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    IS_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    ARRIVALS_FIELD_NUMBER: _ClassVar[int]
    status: TrajectoryStatus
    task_id: str
    sample_index: int
    started_at: float
    finished_at: float
    finish_reason: str
    reward: float
    reward_components: _containers.ScalarMap[str, float]
    verifier_log: str
    turn_rewards: _containers.ScalarMap[int, float]
    worker_history: _containers.RepeatedCompositeFieldContainer[Segment]
    turns: _containers.RepeatedCompositeFieldContainer[ShownTurn]
    prompt_tokens: int
    total_tokens: int
    first_token: int
    token_ids: bytes
    logprobs: bytes
    is_sampled: bytes
    arrivals: _containers.RepeatedCompositeFieldContainer[ShownArrival]
    def __init__(self, status: _Optional[_Union[TrajectoryStatus, _Mapping]] = ..., task_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., started_at: _Optional[float] = ..., finished_at: _Optional[float] = ..., finish_reason: _Optional[str] = ..., reward: _Optional[float] = ..., reward_components: _Optional[_Mapping[str, float]] = ..., verifier_log: _Optional[str] = ..., turn_rewards: _Optional[_Mapping[int, float]] = ..., worker_history: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., turns: _Optional[_Iterable[_Union[ShownTurn, _Mapping]]] = ..., prompt_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ..., first_token: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., is_sampled: _Optional[bytes] = ..., arrivals: _Optional[_Iterable[_Union[ShownArrival, _Mapping]]] = ...) -> None: ...

class ShownArrival(_message.Message):
    __slots__ = ("at", "left_at")
    AT_FIELD_NUMBER: _ClassVar[int]
    LEFT_AT_FIELD_NUMBER: _ClassVar[int]
    at: float
    left_at: float
    def __init__(self, at: _Optional[float] = ..., left_at: _Optional[float] = ...) -> None: ...

class ShownTurn(_message.Message):
    __slots__ = ("turn", "at", "given_tokens", "first_token", "sampled_tokens", "name", "after_turn", "is_fork", "ended_at", "begun_at")
    TURN_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    GIVEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_TURN_FIELD_NUMBER: _ClassVar[int]
    IS_FORK_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    BEGUN_AT_FIELD_NUMBER: _ClassVar[int]
    turn: int
    at: float
    given_tokens: int
    first_token: int
    sampled_tokens: int
    name: str
    after_turn: int
    is_fork: bool
    ended_at: float
    begun_at: float
    def __init__(self, turn: _Optional[int] = ..., at: _Optional[float] = ..., given_tokens: _Optional[int] = ..., first_token: _Optional[int] = ..., sampled_tokens: _Optional[int] = ..., name: _Optional[str] = ..., after_turn: _Optional[int] = ..., is_fork: _Optional[bool] = ..., ended_at: _Optional[float] = ..., begun_at: _Optional[float] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("trajectory_id", "target_worker")
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_WORKER_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    target_worker: str
    def __init__(self, trajectory_id: _Optional[str] = ..., target_worker: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id", "within_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    within_s: float
    def __init__(self, worker_id: _Optional[str] = ..., within_s: _Optional[float] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("workers", "host")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    workers: int
    host: str
    def __init__(self, workers: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class RebalanceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class CheckpointReply(_message.Message):
    __slots__ = ("folder", "incarnation", "step", "groups", "groups_leased", "prompts_queued", "log_bytes", "live_bytes", "segments", "kept", "kept_version")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_LEASED_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_QUEUED_FIELD_NUMBER: _ClassVar[int]
    LOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    KEPT_VERSION_FIELD_NUMBER: _ClassVar[int]
    folder: str
    incarnation: int
    step: int
    groups: int
    groups_leased: int
    prompts_queued: int
    log_bytes: int
    live_bytes: int
    segments: int
    kept: str
    kept_version: int
    def __init__(self, folder: _Optional[str] = ..., incarnation: _Optional[int] = ..., step: _Optional[int] = ..., groups: _Optional[int] = ..., groups_leased: _Optional[int] = ..., prompts_queued: _Optional[int] = ..., log_bytes: _Optional[int] = ..., live_bytes: _Optional[int] = ..., segments: _Optional[int] = ..., kept: _Optional[str] = ..., kept_version: _Optional[int] = ...) -> None: ...

class OperatorReply(_message.Message):
    __slots__ = ("message", "moves", "loads")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    message: str
    moves: int
    loads: int
    def __init__(self, message: _Optional[str] = ..., moves: _Optional[int] = ..., loads: _Optional[int] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "report", "outcome", "copy_began", "pool_hello", "pool_report", "outcomes")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    COPY_BEGAN_FIELD_NUMBER: _ClassVar[int]
    POOL_HELLO_FIELD_NUMBER: _ClassVar[int]
    POOL_REPORT_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    report: WorkerReport
    outcome: WorkerOutcome
    copy_began: CopyBegan
    pool_hello: PoolHello
    pool_report: PoolReport
    outcomes: WorkerOutcomes
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., report: _Optional[_Union[WorkerReport, _Mapping]] = ..., outcome: _Optional[_Union[WorkerOutcome, _Mapping]] = ..., copy_began: _Optional[_Union[CopyBegan, _Mapping]] = ..., pool_hello: _Optional[_Union[PoolHello, _Mapping]] = ..., pool_report: _Optional[_Union[PoolReport, _Mapping]] = ..., outcomes: _Optional[_Union[WorkerOutcomes, _Mapping]] = ...) -> None: ...

class WorkerOutcomes(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[WorkerOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[WorkerOutcome, _Mapping]]] = ...) -> None: ...

class PoolHello(_message.Message):
    __slots__ = ("pool_id", "pid", "host", "memory_bytes", "spill_bytes", "kv_address", "kv_transports", "held")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPILL_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    pid: int
    host: str
    memory_bytes: int
    spill_bytes: int
    kv_address: str
    kv_transports: _containers.RepeatedScalarFieldContainer[str]
    held: _containers.RepeatedCompositeFieldContainer[HeldRequest]
    def __init__(self, pool_id: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., spill_bytes: _Optional[int] = ..., kv_address: _Optional[str] = ..., kv_transports: _Optional[_Iterable[str]] = ..., held: _Optional[_Iterable[_Union[HeldRequest, _Mapping]]] = ...) -> None: ...

class HeldRequest(_message.Message):
    __slots__ = ("request_id", "tokens", "first_token", "given_digest", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GIVEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: int
    first_token: int
    given_digest: bytes
    prompt_logprobs: bool
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[int] = ..., first_token: _Optional[int] = ..., given_digest: _Optional[bytes] = ..., prompt_logprobs: _Optional[bool] = ...) -> None: ...

class PoolReport(_message.Message):
    __slots__ = ("parked", "memory_bytes", "spill_bytes", "pinned_bytes", "spilled", "dropped", "reason", "at")
    PARKED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPILL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPILLED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    parked: int
    memory_bytes: int
    spill_bytes: int
    pinned_bytes: int
    spilled: int
    dropped: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    at: float
    def __init__(self, parked: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., spill_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., spilled: _Optional[int] = ..., dropped: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., at: _Optional[float] = ...) -> None: ...

class CopyBegan(_message.Message):
    __slots__ = ("command_id",)
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    command_id: int
    def __init__(self, command_id: _Optional[int] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("worker_id", "pid", "host", "fingerprint", "slots", "kv_tokens", "block_tokens", "max_model_len_tokens", "vocab_size", "dtype", "kv_address", "kv_transports", "kv_token_bytes", "tensor_parallel", "pipeline_parallel", "takes_start_requests", "hosts", "held", "state_bytes", "full_precision")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    TAKES_START_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FULL_PRECISION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pid: int
    host: str
    fingerprint: str
    slots: int
    kv_tokens: int
    block_tokens: int
    max_model_len_tokens: int
    vocab_size: int
    dtype: str
    kv_address: str
    kv_transports: _containers.RepeatedScalarFieldContainer[str]
    kv_token_bytes: int
    tensor_parallel: int
    pipeline_parallel: int
    takes_start_requests: bool
    hosts: HostedVersion
    held: _containers.RepeatedCompositeFieldContainer[HeldRequest]
    state_bytes: int
    full_precision: bool
    def __init__(self, worker_id: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., fingerprint: _Optional[str] = ..., slots: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ..., max_model_len_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_address: _Optional[str] = ..., kv_transports: _Optional[_Iterable[str]] = ..., kv_token_bytes: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., takes_start_requests: _Optional[bool] = ..., hosts: _Optional[_Union[HostedVersion, _Mapping]] = ..., held: _Optional[_Iterable[_Union[HeldRequest, _Mapping]]] = ..., state_bytes: _Optional[int] = ..., full_precision: _Optional[bool] = ...) -> None: ...

class HostedVersion(_message.Message):
    __slots__ = ("version", "name")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    version: int
    name: str
    def __init__(self, version: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("tokens", "running", "waiting", "kv_used_tokens", "reprefilled_tokens", "generated_tokens", "version", "at", "kv_tier", "preemptions", "times", "begun", "state_bytes", "states_dropped", "drafted_tokens", "accepted_tokens")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    KV_TIER_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: TokenColumns
    running: int
    waiting: int
    kv_used_tokens: int
    reprefilled_tokens: int
    generated_tokens: int
    version: int
    at: float
    kv_tier: KvTierLoad
    preemptions: int
    times: EngineTimes
    begun: _containers.RepeatedScalarFieldContainer[int]
    state_bytes: int
    states_dropped: int
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, tokens: _Optional[_Union[TokenColumns, _Mapping]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_used_tokens: _Optional[int] = ..., reprefilled_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., version: _Optional[int] = ..., at: _Optional[float] = ..., kv_tier: _Optional[_Union[KvTierLoad, _Mapping]] = ..., preemptions: _Optional[int] = ..., times: _Optional[_Union[EngineTimes, _Mapping]] = ..., begun: _Optional[_Iterable[int]] = ..., state_bytes: _Optional[int] = ..., states_dropped: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class EngineTimes(_message.Message):
    __slots__ = ("histograms", "ended", "prompt_tokens")
    class EndedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HISTOGRAMS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    histograms: _containers.RepeatedCompositeFieldContainer[Histogram]
    ended: _containers.ScalarMap[str, int]
    prompt_tokens: int
    def __init__(self, histograms: _Optional[_Iterable[_Union[Histogram, _Mapping]]] = ..., ended: _Optional[_Mapping[str, int]] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("name", "buckets", "sum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    buckets: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, name: _Optional[str] = ..., buckets: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class KvTierLoad(_message.Message):
    __slots__ = ("up", "found_tokens", "kept_tokens", "damaged_chunks", "losses")
    UP_FIELD_NUMBER: _ClassVar[int]
    FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    up: bool
    found_tokens: int
    kept_tokens: int
    damaged_chunks: int
    losses: int
    def __init__(self, up: _Optional[bool] = ..., found_tokens: _Optional[int] = ..., kept_tokens: _Optional[int] = ..., damaged_chunks: _Optional[int] = ..., losses: _Optional[int] = ...) -> None: ...

class TokenColumns(_message.Message):
    __slots__ = ("rows", "first_tokens", "counts", "ends", "token_ids", "logprobs", "stops", "routed_bytes", "routed_experts", "prompt_logprobs")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    first_tokens: bytes
    counts: bytes
    ends: bytes
    token_ids: bytes
    logprobs: bytes
    stops: _containers.RepeatedCompositeFieldContainer[StopCompleted]
    routed_bytes: bytes
    routed_experts: bytes
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    def __init__(self, rows: _Optional[bytes] = ..., first_tokens: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., ends: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., stops: _Optional[_Iterable[_Union[StopCompleted, _Mapping]]] = ..., routed_bytes: _Optional[bytes] = ..., routed_experts: _Optional[bytes] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("span", "logprobs")
    SPAN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    span: int
    logprobs: bytes
    def __init__(self, span: _Optional[int] = ..., logprobs: _Optional[bytes] = ...) -> None: ...

class StopCompleted(_message.Message):
    __slots__ = ("span", "stop")
    SPAN_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    span: int
    stop: str
    def __init__(self, span: _Optional[int] = ..., stop: _Optional[str] = ...) -> None: ...

class WorkerOutcome(_message.Message):
    __slots__ = ("command_id", "ok", "error", "error_kind", "locator", "snapshot_bytes", "tokens", "at", "canary", "canary_difference", "kv_transport", "kv_fallbacks")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_KIND_FIELD_NUMBER: _ClassVar[int]
    LOCATOR_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    CANARY_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    KV_FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    command_id: int
    ok: bool
    error: str
    error_kind: str
    locator: str
    snapshot_bytes: int
    tokens: int
    at: float
    canary: Canary
    canary_difference: float
    kv_transport: str
    kv_fallbacks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, command_id: _Optional[int] = ..., ok: _Optional[bool] = ..., error: _Optional[str] = ..., error_kind: _Optional[str] = ..., locator: _Optional[str] = ..., snapshot_bytes: _Optional[int] = ..., tokens: _Optional[int] = ..., at: _Optional[float] = ..., canary: _Optional[_Union[Canary, _Mapping]] = ..., canary_difference: _Optional[float] = ..., kv_transport: _Optional[str] = ..., kv_fallbacks: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerCommand(_message.Message):
    __slots__ = ("command_id", "welcome", "load_version", "start_request", "remove_request", "reserve_slot", "cancel_reservation", "copy_out", "copy_in", "thaw", "shutdown", "pace", "start_requests", "settled", "extend_request", "remember")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    LOAD_VERSION_FIELD_NUMBER: _ClassVar[int]
    START_REQUEST_FIELD_NUMBER: _ClassVar[int]
    REMOVE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SLOT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_RESERVATION_FIELD_NUMBER: _ClassVar[int]
    COPY_OUT_FIELD_NUMBER: _ClassVar[int]
    COPY_IN_FIELD_NUMBER: _ClassVar[int]
    THAW_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    START_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    EXTEND_REQUEST_FIELD_NUMBER: _ClassVar[int]
    REMEMBER_FIELD_NUMBER: _ClassVar[int]
    command_id: int
    welcome: Welcome
    load_version: LoadVersion
    start_request: StartRequest
    remove_request: RemoveRequest
    reserve_slot: ReserveSlot
    cancel_reservation: CancelReservation
    copy_out: CopyOut
    copy_in: CopyIn
    thaw: Thaw
    shutdown: Shutdown
    pace: Pace
    start_requests: StartRequests
    settled: Settled
    extend_request: ExtendRequest
    remember: Remember
    def __init__(self, command_id: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., load_version: _Optional[_Union[LoadVersion, _Mapping]] = ..., start_request: _Optional[_Union[StartRequest, _Mapping]] = ..., remove_request: _Optional[_Union[RemoveRequest, _Mapping]] = ..., reserve_slot: _Optional[_Union[ReserveSlot, _Mapping]] = ..., cancel_reservation: _Optional[_Union[CancelReservation, _Mapping]] = ..., copy_out: _Optional[_Union[CopyOut, _Mapping]] = ..., copy_in: _Optional[_Union[CopyIn, _Mapping]] = ..., thaw: _Optional[_Union[Thaw, _Mapping]] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., start_requests: _Optional[_Union[StartRequests, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ..., extend_request: _Optional[_Union[ExtendRequest, _Mapping]] = ..., remember: _Optional[_Union[Remember, _Mapping]] = ...) -> None: ...

class Remember(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[RememberedResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[RememberedResponse, _Mapping]]] = ...) -> None: ...

class RememberedResponse(_message.Message):
    __slots__ = ("scope", "task", "token_ids")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    scope: bytes
    task: bytes
    token_ids: bytes
    def __init__(self, scope: _Optional[bytes] = ..., task: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class StartRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[StartRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[StartRequest, _Mapping]]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch", "snapshot_folder", "weights_folder", "report_period_ms", "kv", "orphan_timeout_s", "goes_on")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FOLDER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FOLDER_FIELD_NUMBER: _ClassVar[int]
    REPORT_PERIOD_MS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    snapshot_folder: str
    weights_folder: str
    report_period_ms: int
    kv: KvSettings
    orphan_timeout_s: float
    goes_on: _containers.RepeatedCompositeFieldContainer[GoesOn]
    def __init__(self, epoch: _Optional[int] = ..., snapshot_folder: _Optional[str] = ..., weights_folder: _Optional[str] = ..., report_period_ms: _Optional[int] = ..., kv: _Optional[_Union[KvSettings, _Mapping]] = ..., orphan_timeout_s: _Optional[float] = ..., goes_on: _Optional[_Iterable[_Union[GoesOn, _Mapping]]] = ...) -> None: ...

class GoesOn(_message.Message):
    __slots__ = ("request_id", "row", "tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    row: int
    tokens: int
    def __init__(self, request_id: _Optional[str] = ..., row: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("report_period_ms",)
    REPORT_PERIOD_MS_FIELD_NUMBER: _ClassVar[int]
    report_period_ms: int
    def __init__(self, report_period_ms: _Optional[int] = ...) -> None: ...

class KvSettings(_message.Message):
    __slots__ = ("secret", "transports", "bandwidth_bytes_per_s", "memory_bytes", "timeout_s")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    transports: _containers.RepeatedScalarFieldContainer[str]
    bandwidth_bytes_per_s: float
    memory_bytes: int
    timeout_s: float
    def __init__(self, secret: _Optional[bytes] = ..., transports: _Optional[_Iterable[str]] = ..., bandwidth_bytes_per_s: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class KvPeer(_message.Message):
    __slots__ = ("worker_id", "epoch", "address", "transports")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    address: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadVersion(_message.Message):
    __slots__ = ("version", "name", "canary")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    version: int
    name: str
    canary: Canary
    def __init__(self, version: _Optional[int] = ..., name: _Optional[str] = ..., canary: _Optional[_Union[Canary, _Mapping]] = ...) -> None: ...

class StartRequest(_message.Message):
    __slots__ = ("request_id", "version", "prompt_token_ids", "sampling", "output_token_ids", "logprobs", "row", "command_id", "keeps", "given", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    version: int
    prompt_token_ids: bytes
    sampling: Sampling
    output_token_ids: bytes
    logprobs: bytes
    row: int
    command_id: int
    keeps: bool
    given: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: bool
    def __init__(self, request_id: _Optional[str] = ..., version: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., output_token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., row: _Optional[int] = ..., command_id: _Optional[int] = ..., keeps: _Optional[bool] = ..., given: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[bool] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("request_id", "given_token_ids", "sampling", "row", "first_token", "prompt_logprobs", "dropped_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GIVEN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    given_token_ids: bytes
    sampling: Sampling
    row: int
    first_token: int
    prompt_logprobs: bool
    dropped_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., given_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., row: _Optional[int] = ..., first_token: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ..., dropped_tokens: _Optional[int] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ReserveSlot(_message.Message):
    __slots__ = ("request_id", "version", "kv_tokens", "source_epoch", "kv_bytes", "most_bytes", "needs_slot")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEEDS_SLOT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    version: int
    kv_tokens: int
    source_epoch: int
    kv_bytes: int
    most_bytes: int
    needs_slot: bool
    def __init__(self, request_id: _Optional[str] = ..., version: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., source_epoch: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., most_bytes: _Optional[int] = ..., needs_slot: _Optional[bool] = ...) -> None: ...

class CancelReservation(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CopyOut(_message.Message):
    __slots__ = ("request_id", "target")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target: KvPeer
    def __init__(self, request_id: _Optional[str] = ..., target: _Optional[_Union[KvPeer, _Mapping]] = ...) -> None: ...

class CopyIn(_message.Message):
    __slots__ = ("request_id", "version", "locator", "row")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOCATOR_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    version: int
    locator: str
    row: int
    def __init__(self, request_id: _Optional[str] = ..., version: _Optional[int] = ..., locator: _Optional[str] = ..., row: _Optional[int] = ...) -> None: ...

class Thaw(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ("starts_again", "full_precision")
    STARTS_AGAIN_FIELD_NUMBER: _ClassVar[int]
    FULL_PRECISION_FIELD_NUMBER: _ClassVar[int]
    starts_again: bool
    full_precision: bool
    def __init__(self, starts_again: _Optional[bool] = ..., full_precision: _Optional[bool] = ...) -> None: ...

class HostMessage(_message.Message):
    __slots__ = ("hello", "report", "arrived", "leaving", "ready", "failed", "examined")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_FIELD_NUMBER: _ClassVar[int]
    hello: HostHello
    report: HostReport
    arrived: VersionArrived
    leaving: HostLeaving
    ready: HostReady
    failed: VersionFailed
    examined: HostExamination
    def __init__(self, hello: _Optional[_Union[HostHello, _Mapping]] = ..., report: _Optional[_Union[HostReport, _Mapping]] = ..., arrived: _Optional[_Union[VersionArrived, _Mapping]] = ..., leaving: _Optional[_Union[HostLeaving, _Mapping]] = ..., ready: _Optional[_Union[HostReady, _Mapping]] = ..., failed: _Optional[_Union[VersionFailed, _Mapping]] = ..., examined: _Optional[_Union[HostExamination, _Mapping]] = ...) -> None: ...

class HostHello(_message.Message):
    __slots__ = ("name", "dora_version", "pid", "workers", "device", "model_digest", "capacity", "zone", "kept")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DORA_VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    name: str
    dora_version: str
    pid: int
    workers: int
    device: str
    model_digest: str
    capacity: HostCapacity
    zone: str
    kept: KeptHost
    def __init__(self, name: _Optional[str] = ..., dora_version: _Optional[str] = ..., pid: _Optional[int] = ..., workers: _Optional[int] = ..., device: _Optional[str] = ..., model_digest: _Optional[str] = ..., capacity: _Optional[_Union[HostCapacity, _Mapping]] = ..., zone: _Optional[str] = ..., kept: _Optional[_Union[KeptHost, _Mapping]] = ...) -> None: ...

class KeptHost(_message.Message):
    __slots__ = ("epoch", "worker_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class HostCapacity(_message.Message):
    __slots__ = ("cores", "memory_bytes", "memory_free_bytes", "store_free_bytes", "gpus")
    CORES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    cores: int
    memory_bytes: int
    memory_free_bytes: int
    store_free_bytes: int
    gpus: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cores: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., memory_free_bytes: _Optional[int] = ..., store_free_bytes: _Optional[int] = ..., gpus: _Optional[_Iterable[str]] = ...) -> None: ...

class HostReport(_message.Message):
    __slots__ = ("capacity", "troubles", "failed")
    class TroublesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    capacity: HostCapacity
    troubles: _containers.ScalarMap[str, str]
    failed: str
    def __init__(self, capacity: _Optional[_Union[HostCapacity, _Mapping]] = ..., troubles: _Optional[_Mapping[str, str]] = ..., failed: _Optional[str] = ...) -> None: ...

class HostReady(_message.Message):
    __slots__ = ("relay_address", "held")
    RELAY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    relay_address: str
    held: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, relay_address: _Optional[str] = ..., held: _Optional[_Iterable[str]] = ...) -> None: ...

class VersionArrived(_message.Message):
    __slots__ = ("name", "upstream", "came_bytes", "took_s", "bytes_per_s", "start_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_FIELD_NUMBER: _ClassVar[int]
    CAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    upstream: str
    came_bytes: int
    took_s: float
    bytes_per_s: float
    start_s: float
    def __init__(self, name: _Optional[str] = ..., upstream: _Optional[str] = ..., came_bytes: _Optional[int] = ..., took_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ..., start_s: _Optional[float] = ...) -> None: ...

class VersionFailed(_message.Message):
    __slots__ = ("name", "reason", "culprits")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CULPRITS_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    culprits: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ..., culprits: _Optional[_Iterable[str]] = ...) -> None: ...

class HostLeaving(_message.Message):
    __slots__ = ("within_s",)
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    within_s: float
    def __init__(self, within_s: _Optional[float] = ...) -> None: ...

class HostOrder(_message.Message):
    __slots__ = ("welcome", "start_worker", "stop_worker", "fetch_version", "drop_version", "leave", "examine", "serving")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    START_WORKER_FIELD_NUMBER: _ClassVar[int]
    STOP_WORKER_FIELD_NUMBER: _ClassVar[int]
    FETCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    DROP_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    EXAMINE_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    welcome: HostWelcome
    start_worker: StartWorker
    stop_worker: StopWorker
    fetch_version: FetchVersion
    drop_version: DropVersion
    leave: LeaveHost
    examine: ExamineHost
    serving: HostServing
    def __init__(self, welcome: _Optional[_Union[HostWelcome, _Mapping]] = ..., start_worker: _Optional[_Union[StartWorker, _Mapping]] = ..., stop_worker: _Optional[_Union[StopWorker, _Mapping]] = ..., fetch_version: _Optional[_Union[FetchVersion, _Mapping]] = ..., drop_version: _Optional[_Union[DropVersion, _Mapping]] = ..., leave: _Optional[_Union[LeaveHost, _Mapping]] = ..., examine: _Optional[_Union[ExamineHost, _Mapping]] = ..., serving: _Optional[_Union[HostServing, _Mapping]] = ...) -> None: ...

class HostServing(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: int
    def __init__(self, workers: _Optional[int] = ...) -> None: ...

class ExamineHost(_message.Message):
    __slots__ = ("examination", "peers", "kv_bytes")
    EXAMINATION_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    examination: int
    peers: _containers.RepeatedCompositeFieldContainer[RelayPeer]
    kv_bytes: int
    def __init__(self, examination: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[RelayPeer, _Mapping]]] = ..., kv_bytes: _Optional[int] = ...) -> None: ...

class HostExamination(_message.Message):
    __slots__ = ("examination", "received_at", "sent_at", "dora_version", "python_version", "packages", "capacity", "folder_free_bytes", "disk_bytes_per_s", "version_bytes", "read_bytes_per_s", "certificate", "links", "fetch")
    class PackagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    EXAMINATION_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_AT_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    DORA_VERSION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_VERSION_FIELD_NUMBER: _ClassVar[int]
    PACKAGES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    VERSION_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    examination: int
    received_at: float
    sent_at: float
    dora_version: str
    python_version: str
    packages: _containers.ScalarMap[str, str]
    capacity: HostCapacity
    folder_free_bytes: int
    disk_bytes_per_s: float
    version_bytes: int
    read_bytes_per_s: float
    certificate: Certificate
    links: _containers.RepeatedCompositeFieldContainer[MeasuredLink]
    fetch: FetchProbe
    def __init__(self, examination: _Optional[int] = ..., received_at: _Optional[float] = ..., sent_at: _Optional[float] = ..., dora_version: _Optional[str] = ..., python_version: _Optional[str] = ..., packages: _Optional[_Mapping[str, str]] = ..., capacity: _Optional[_Union[HostCapacity, _Mapping]] = ..., folder_free_bytes: _Optional[int] = ..., disk_bytes_per_s: _Optional[float] = ..., version_bytes: _Optional[int] = ..., read_bytes_per_s: _Optional[float] = ..., certificate: _Optional[_Union[Certificate, _Mapping]] = ..., links: _Optional[_Iterable[_Union[MeasuredLink, _Mapping]]] = ..., fetch: _Optional[_Union[FetchProbe, _Mapping]] = ...) -> None: ...

class FetchProbe(_message.Message):
    __slots__ = ("host", "bytes", "took_s", "trouble")
    HOST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    host: str
    bytes: int
    took_s: float
    trouble: str
    def __init__(self, host: _Optional[str] = ..., bytes: _Optional[int] = ..., took_s: _Optional[float] = ..., trouble: _Optional[str] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("file", "roles", "begins_at", "ends_at", "trouble")
    FILE_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    BEGINS_AT_FIELD_NUMBER: _ClassVar[int]
    ENDS_AT_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    file: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    begins_at: float
    ends_at: float
    trouble: str
    def __init__(self, file: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., begins_at: _Optional[float] = ..., ends_at: _Optional[float] = ..., trouble: _Optional[str] = ...) -> None: ...

class MeasuredLink(_message.Message):
    __slots__ = ("host", "address", "bytes_per_s", "round_trip_s", "loss", "trouble", "kv_bytes", "kv_s")
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_S_FIELD_NUMBER: _ClassVar[int]
    host: str
    address: str
    bytes_per_s: float
    round_trip_s: float
    loss: float
    trouble: str
    kv_bytes: int
    kv_s: float
    def __init__(self, host: _Optional[str] = ..., address: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., round_trip_s: _Optional[float] = ..., loss: _Optional[float] = ..., trouble: _Optional[str] = ..., kv_bytes: _Optional[int] = ..., kv_s: _Optional[float] = ...) -> None: ...

class HostWelcome(_message.Message):
    __slots__ = ("epoch", "settings_json", "model_digest", "pool_token", "versions_most", "relay_secret", "goes_on", "orphan_timeout_s", "notice_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POOL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_MOST_FIELD_NUMBER: _ClassVar[int]
    RELAY_SECRET_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    NOTICE_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    settings_json: str
    model_digest: str
    pool_token: str
    versions_most: int
    relay_secret: bytes
    goes_on: bool
    orphan_timeout_s: float
    notice_s: float
    def __init__(self, epoch: _Optional[int] = ..., settings_json: _Optional[str] = ..., model_digest: _Optional[str] = ..., pool_token: _Optional[str] = ..., versions_most: _Optional[int] = ..., relay_secret: _Optional[bytes] = ..., goes_on: _Optional[bool] = ..., orphan_timeout_s: _Optional[float] = ..., notice_s: _Optional[float] = ...) -> None: ...

class StartWorker(_message.Message):
    __slots__ = ("worker_id", "token")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    token: str
    def __init__(self, worker_id: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class StopWorker(_message.Message):
    __slots__ = ("worker_id", "again", "token")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    again: bool
    token: str
    def __init__(self, worker_id: _Optional[str] = ..., again: _Optional[bool] = ..., token: _Optional[str] = ...) -> None: ...

class FetchVersion(_message.Message):
    __slots__ = ("name", "upstreams", "piece_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UPSTREAMS_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    upstreams: _containers.RepeatedCompositeFieldContainer[RelayPeer]
    piece_bytes: int
    def __init__(self, name: _Optional[str] = ..., upstreams: _Optional[_Iterable[_Union[RelayPeer, _Mapping]]] = ..., piece_bytes: _Optional[int] = ...) -> None: ...

class RelayPeer(_message.Message):
    __slots__ = ("host", "epoch", "address", "base")
    HOST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    host: str
    epoch: int
    address: str
    base: str
    def __init__(self, host: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., base: _Optional[str] = ...) -> None: ...

class DropVersion(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class LeaveHost(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ListFilesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListFilesReply(_message.Message):
    __slots__ = ("files", "digest")
    FILES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[ModelFile]
    digest: str
    def __init__(self, files: _Optional[_Iterable[_Union[ModelFile, _Mapping]]] = ..., digest: _Optional[str] = ...) -> None: ...

class ModelFile(_message.Message):
    __slots__ = ("name", "file_bytes", "blake3")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLAKE3_FIELD_NUMBER: _ClassVar[int]
    name: str
    file_bytes: int
    blake3: bytes
    def __init__(self, name: _Optional[str] = ..., file_bytes: _Optional[int] = ..., blake3: _Optional[bytes] = ...) -> None: ...

class FetchFileRequest(_message.Message):
    __slots__ = ("name", "offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("content",)
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    def __init__(self, content: _Optional[bytes] = ...) -> None: ...
