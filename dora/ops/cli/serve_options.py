"""The options of ``dora serve``, and the settings that they set."""

from pathlib import Path
from typing import Annotated, Final

from typer import Context, Option

from dora.config import Override, overrides_of
from dora.ops.cli import completion
from dora.ops.cli.options import WINDOW_METAVAR, source_of, token_option, window_size
from dora.tls.files import FOLDER_VARIABLE, VARIABLES

ConfigFileOption = Annotated[Path | None, Option("--config", metavar="FILE", help="TOML configuration.")]
WindowOption = Annotated[
    str | None, Option(metavar=WINDOW_METAVAR, help="Maximum number of live policy versions (window.size).")
]
WorkersOption = Annotated[int | None, Option(help="Number of rollout workers to start (workers.count).")]
ModelOption = Annotated[
    str | None,
    Option(autocompletion=completion.models, help="smollm2, tiny, tiny-moe, tiny-hybrid, or a Hugging Face folder."),
]
PromptsOption = Annotated[
    str | None,
    Option(
        autocompletion=lambda: completion.PROMPTS,
        help="reasoning-gym:TASK,..., a file, a dataset's folder, counting, tiny, tiny-tail, or none.",
    ),
]
RewardOption = Annotated[
    str | None,
    Option(metavar="MODULE:FUNCTION", autocompletion=lambda: completion.REWARDS, help="Verifier (reward.function)."),
]
RecordOption = Annotated[str | None, Option(metavar="DIR", help="Folder for trajectories and versions.")]
RecordWeightsOption = Annotated[
    str | None,
    Option(
        metavar="all|none|'every N'",
        help="Versions whose weights the record keeps besides the first and the last two (record_weights).",
    ),
]
StateOption = Annotated[
    str | None, Option(metavar="DIR", help="State folder, from which a restart continues (service.state).")
]
BeginFromOption = Annotated[
    str | None,
    Option(
        "--from",
        metavar="STATE@VERSION",
        help="Begin a new run with this version or checkpoint of another state folder (service.begin_from).",
    ),
]
DeviceOption = Annotated[
    str | None, Option(metavar="DEVICE", help="cpu, cuda, or cuda:0,1: of the workers (workers.device).")
]
GpusForTrainerOption = Annotated[
    int | None, Option(metavar="N", help="GPUs, the last ones, that no worker gets (workers.gpus_for_trainer).")
]
CarryOnFromOption = Annotated[
    int | None,
    Option(metavar="STEP", help="Carry on from this step although record, prompts, reward or model have changed."),
]
KvTierOption = Annotated[
    str | None,
    Option(metavar="TIER", autocompletion=lambda: completion.KV_TIERS, help="Shared KV: none or lmcache (kv.tier)."),
]
ListenOption = Annotated[str | None, Option(metavar="HOST:PORT", help="Address (service.listen).")]
MetricsOption = Annotated[
    str | None, Option(metavar="HOST:PORT", help="Address of the metrics for Prometheus (service.metrics).")
]
LogFormatOption = Annotated[str | None, Option(metavar="text|json", help="Lines of the log (service.log_format).")]
TracesOption = Annotated[
    str | None, Option(metavar="URL", help="OpenTelemetry collector that gets traces (service.traces).")
]
EnvironmentOption = Annotated[
    str | None, Option(metavar="SPEC", help="Environment of the source's prompts (environment.spec).")
]
HttpOption = Annotated[
    str | None, Option(metavar="HOST:PORT", help="Also serve agents over HTTP there, by a process of `dora front`.")
]
HttpKeyOption = Annotated[
    Path | None, Option("--http-key-file", metavar="FILE", help="File (mode 0600) with the key of all agents.")
]
OwnerTokenOption = Annotated[
    str | None, token_option("File (mode 0600) with the owner's token; default: DORA_TOKEN, or a new one.")
]
TlsOption = Annotated[
    str | None,
    Option("--tls", metavar="DIR", envvar=FOLDER_VARIABLE, help="Folder with cert.pem, key.pem, ca.pem (tls.folder)."),
]
TlsCertOption = Annotated[
    str | None, Option("--tls-cert", metavar="FILE", envvar=VARIABLES["cert"], help="Certificate (tls.cert).")
]
TlsKeyOption = Annotated[
    str | None, Option("--tls-key", metavar="FILE", envvar=VARIABLES["key"], help="Its key (tls.key).")
]
TlsCaOption = Annotated[
    str | None, Option("--tls-ca", metavar="FILE", envvar=VARIABLES["ca"], help="Accepted authorities (tls.ca).")
]
TlsClientsOption = Annotated[
    str | None, Option("--tls-clients", metavar="certificate|token", help="What clients must have (tls.clients).")
]
DryRunOption = Annotated[
    bool, Option("--dry-run", metavar="", help="Run all checks of a start, print the configuration, and exit.")
]
AttachJsonOption = Annotated[
    bool, Option("--json", metavar="", help="Print the configuration, or how to attach, as JSON.")
]

SETTINGS: Final = {  # by parameter
    "workers": "workers.count",
    "model": "model",
    "prompts": "prompts",
    "reward": "reward.function",
    "environment": "environment.spec",
    "record": "record",
    "record_weights": "record_weights",
    "state": "service.state",
    "begin_from": "service.begin_from",
    "device": "workers.device",
    "gpus_for_trainer": "workers.gpus_for_trainer",
    "carry_on_from": "service.carry_on_from",
    "kv_tier": "kv.tier",
    "listen": "service.listen",
    "metrics": "service.metrics",
    "log_format": "service.log_format",
    "traces": "service.traces",
    "tls": "tls.folder",
    "tls_cert": "tls.cert",
    "tls_key": "tls.key",
    "tls_ca": "tls.ca",
    "tls_clients": "tls.clients",
}


def short_options(context: Context) -> list[Override]:
    """Returns the settings that the options of this call give."""
    of_call = context.params
    source = source_of(of_call["token"] or "")
    return overrides_of(
        {
            **{setting: of_call[name] for name, setting in SETTINGS.items()},
            "window.size": window_size(of_call["window"]),
            "service.token": of_call["token"] or None,
            "service.token_file": str(source) if isinstance(source, Path) else None,
        }
    )
