"""Configuration of a gateway: its models, address, limits and default sampling.

It is a JSON file (docs/reference/formats.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from trtllm_pipeline.base import UsageError, user_files, write_json
from trtllm_pipeline.orchestrate import GatewayParams
from trtllm_pipeline.tensorrt import params as stage_params

SCHEMA: Final = 1
GATEWAY_FILE: Final = "gateway.json"
"""Written next to the configuration while the gateway listens: url, pid, models."""
CONFIG_FILE: Final = "gateway-config.json"
"""File name of a configuration that the pipeline writes."""
AUTO: Final = "auto"
OF_TRITON: Final = ("end_id", "pad_id")
"""Sampling parameters that only Triton accepts."""
_SCHEMES: Final = {"grpc", "http", "https"}


@dataclass(frozen=True, kw_only=True)
class OfferedModel:
    """One model that a gateway offers, and the server behind it: either `service` or `url`."""

    name: str
    service: Path | None = None
    """Path of service.json. It is read again after a restart of the server."""
    url: str | None = None
    """`grpc://HOST[:PORT]` of a Triton, or `http://HOST:PORT[/v1]` of an OpenAI-compatible server."""
    server_model: str | None = None
    """Name on the server. Default: the one in service.json, the only one of a Triton at a URL, or `name`."""
    model_folder: Path | None = None
    """Tokenizer, chat template and generation_config.json. Without it, there is no chat and no prompt token count."""
    dialect: str = AUTO
    """Format of tool calls and reasoning: the name of a family, or `auto`."""
    max_seq_len: int | None = None
    """Tokens of prompt and output together."""
    max_input_len: int | None = None
    """Tokens of a prompt."""
    max_concurrency: int | None = None
    """Maximum requests in progress. Default: the gateway's."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """LoRA adapters of the server: name -> directory. Requests select one as `NAME:ADAPTER`."""

    def __post_init__(self) -> None:
        """Raise UsageError unless exactly one server is given."""
        if not self.name:
            raise UsageError("a served model needs a name")
        if (self.service is None) == (self.url is None):
            raise UsageError(f"model {self.name}: expected either a service.json or a url")
        if self.url is not None and not _is_address(self.url):
            raise UsageError(
                f"model {self.name}: {self.url!r} is not the address of a server",
                hint="grpc://HOST:PORT of a Triton, http://HOST:PORT/v1 of an OpenAI-compatible server",
            )

    @property
    def names(self) -> dict[str, Path | None]:
        """Every name that requests may use -> the directory of its adapter, None for the model itself."""
        return {self.name: None, **{f"{self.name}:{name}": folder for name, folder in self.adapters.items()}}

    @property
    def where(self) -> str:
        """The server's address or file, for messages."""
        return self.url or str(self.service)


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Configuration of a gateway. Raises UsageError for duplicate names or no models."""

    models: tuple[OfferedModel, ...]
    host: str = "127.0.0.1"
    port: int = 0
    """0 picks a free port, which gateway.json records."""
    api_keys_file: Path | None = None
    """File with one key per line. Without it, every client that reaches the port has access."""
    params: GatewayParams = field(default_factory=GatewayParams)

    def __post_init__(self) -> None:
        """Check the names."""
        names = [name for model in self.models for name in model.names]
        if not names:
            raise UsageError("a gateway needs at least one model")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(f"two models have the name {twice}", hint="clients select models by name: choose another")

    def write(self, path: Path) -> None:
        """Write it as JSON, with absolute paths. The file contains no secrets."""
        write_json(path, {"schema": SCHEMA, **self.to_json()})

    def to_json(self) -> dict[str, Any]:
        return {
            "models": [_json(model) for model in self.models],
            "host": self.host,
            "port": self.port,
            "api_keys_file": None if self.api_keys_file is None else str(self.api_keys_file.absolute()),
            "params": stage_params.to_json(self.params),
        }

    @classmethod
    def read(cls, path: Path) -> GatewayConfig:
        """The configuration in a file. Relative paths start at its directory. Raises MatrixError or UsageError."""
        given = user_files.read_mapping(path)
        schema = given.pop("schema", None)
        if schema != SCHEMA:
            raise UsageError(f"{path}: schema is {schema!r}, this release reads {SCHEMA}")
        folder = path.absolute().parent
        try:
            _known(cls, given, "the configuration")
            params = given.get("params") or {}
            _known(GatewayParams, params, "params")
            checked = {**given, "params": stage_params.load(GatewayParams, params)}
            checked["models"] = tuple(_model(each, folder) for each in given.get("models") or ())
            checked["api_keys_file"] = _path(given.get("api_keys_file"), folder)
            return cls(**checked)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise UsageError(f"{path} is not a gateway's configuration: {error}") from error
        except UsageError as error:
            raise UsageError(f"{path}: {error.message}", hint=error.hint) from error


def _is_address(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in _SCHEMES and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        return False


def _json(model: OfferedModel) -> dict[str, Any]:
    values = {
        name: str(value.absolute()) if isinstance(value, Path) else value
        for name, value in asdict(model).items()
        if value is not None
    }
    return {**values, "adapters": {name: str(folder.absolute()) for name, folder in model.adapters.items()}}


def _model(given: Mapping[str, Any], folder: Path) -> OfferedModel:
    _known(OfferedModel, given, "a model")
    paths = {name: _path(given.get(name), folder) for name in ("service", "model_folder")}
    adapters = {name: folder / path for name, path in (given.get("adapters") or {}).items()}
    return OfferedModel(**{**given, **paths, "adapters": adapters})


def _path(given: str | None, folder: Path) -> Path | None:
    return None if given is None else folder / given


def _known(cls: Any, given: Mapping[str, Any], what: str) -> None:
    if unknown := sorted(given.keys() - {each.name for each in fields(cls)}):
        raise UsageError(f"{what} has no {', '.join(unknown)}")
