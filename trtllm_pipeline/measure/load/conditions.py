"""Measurement conditions: the system and workload of a measurement, and whether two measurements are comparable.

`FIELDS` is the only list of the fields of a system and a workload. The load client records them while it measures
(`system`, `workload`). Comparisons, reports and the HTML page use its names and rules.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

from trtllm_pipeline.base import Json, probe
from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.models import Fields

if TYPE_CHECKING:  # reports read conditions without a client
    from trtllm_pipeline.measure.load.load import Level
    from trtllm_pipeline.measure.load.prompts import Prompt
    from trtllm_pipeline.measure.load.target import Target

GROUPS: Final = ("system", "workload")
UNKNOWN: Final = "not recorded"
ELSEWHERE: Final = "another machine"
_YEAR_9999_S: Final = 253_370_764_800
"""Larger times are invalid: calendars have no date for them."""
_IN_WORDS: Final = {"exact_length": "outputs of exactly max_tokens"}
"""Setting -> what it means, if its name is not a word of users."""
_DIGITS: Final = 12
"""Displayed digits of a digest."""


@dataclass(frozen=True, slots=True)
class Field:
    """One property of a system or workload."""

    name: str
    """As in perf.json."""
    label: str
    about: Literal["system", "workload"]
    decides: bool = True
    """Measurements that differ in it are only compared with `--allow`. Other differences are only reported."""
    axes: tuple[str, ...] = ()
    """Further matrix axes that vary it, besides the axis of its name. Comparisons by them expect the difference."""

    def shown(self, value: object) -> str:
        if value == UNKNOWN:
            return UNKNOWN
        if value is None or value == []:
            return "none" if self.about == "system" and value == [] else "-"
        if self.name.endswith("digest"):
            return str(value).rpartition(":")[2][:_DIGITS]
        if self.name == "max_tokens" and isinstance(value, list):
            return str(value[0]) if value[0] == value[-1] else f"{value[0]} to {value[-1]}"
        if isinstance(value, list):
            return ", ".join(map(str, value))
        if isinstance(value, dict):
            return ", ".join(
                _IN_WORDS.get(str(name), str(name)) if each is True else f"{name} {_plain(each)}"
                for name, each in value.items()
            )
        return f"{value} GiB" if self.name.endswith("_gib") else str(value)

    def explained_by(self, axes: Collection[str]) -> bool:
        """True if one of these axes varies this field."""
        return any(axis.rpartition(".")[2] in {self.name, *self.axes} for axis in axes)


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


SERVED_BY: Final = ("toolchain", "frontend")
"""Axes that select the server software."""
RUNTIMES: Final = ("triton", "tensorrt_llm", "xllamacpp")
"""Fields with a version only if that software serves. If it serves on one side only, `server` differs as well."""
FIELDS: Final = (
    Field("server_on", "server on", "system"),
    Field("cpu", "CPU", "system"),
    Field("cores", "cores", "system", axes=("exclusive",)),
    Field("memory_gib", "memory", "system"),
    Field("gpus", "GPUs", "system"),
    Field("driver", "driver", "system"),
    Field("exclusive", "perf.exclusive", "system"),
    Field("server", "server", "system", axes=SERVED_BY),
    Field("triton", "installed Triton", "system", axes=SERVED_BY),
    Field("tensorrt_llm", "TensorRT-LLM", "system", axes=SERVED_BY),
    Field("xllamacpp", "xllamacpp", "system", axes=SERVED_BY),
    Field("cuda", "CUDA", "system", decides=False),
    Field("torch", "torch", "system", decides=False),
    Field("model_optimizer", "Model Optimizer", "system", decides=False),
    Field("os", "OS", "system", decides=False),
    Field("kernel", "kernel", "system", decides=False),
    Field("python", "Python", "system", decides=False),
    Field("pipeline", "trtllm-pipeline", "system", decides=False),
    Field("commit", "commit", "system", decides=False),
    Field("prompts", "prompts", "workload", axes=("input_data",)),
    Field("prompts_digest", "prompts' digest", "workload", axes=("input_data",)),
    Field("synthetic", "synthetic prompts", "workload", decides=False),
    Field("max_tokens", "max_tokens", "workload", axes=("osl",)),
    Field("sampling", "sampling", "workload", axes=("temperature",)),
    Field("protocol", "protocol", "workload", axes=SERVED_BY),
)
"""Conditions of the whole measurement. Fields with `decides=False` rarely change speed, and often differ between two nights."""
LEVEL_FIELDS: Final = (
    Field("requests", "requests", "workload"),
    Field("warmup_requests", "warmup requests", "workload"),
    Field("repeats", "repeats", "workload"),
    Field("arrivals_digest", "arrival times' digest", "workload", axes=("request_distribution",)),
    Field("max_in_flight", "requests in flight at most", "workload"),
    Field("turn_delay_s", "seconds between turns", "workload"),
    Field("trace_speed", "trace speed", "workload"),
)
"""Conditions of one concurrency or request rate."""
OUTPUT_LENGTH: Final = Field(
    "output_tokens_per_request", "mean output tokens", "workload", decides=False, axes=("osl", "max_tokens")
)
"""A result rather than a condition, but one that makes other results differ."""
QUESTION_FIELDS: Final = (
    # Its digest is of prompts as rendered by the model's own template.
    Field("digest", "questions' digest", "workload", axes=("model", "data", "input_data", "metrics")),
    Field("max_tokens", "max_tokens of the questions", "workload"),
)
"""Conditions of an accuracy measurement."""
BY_NAME: Final = {field.name: field for field in FIELDS}
NAMES: Final = frozenset({"questions", *(field.name for field in (*FIELDS, *LEVEL_FIELDS, *QUESTION_FIELDS))})
"""Values of `--allow`, in addition to GROUPS."""


# Recording


def system(target: Target, engine: Path | None = None, exclusive: Json = None) -> dict[str, Json]:
    """The system that a load on `target` is measured on, by the names of FIELDS.

    Only versions of possibly serving `RUNTIMES` are recorded: the runtime of `engine`, and Triton unless the protocol
    is OpenAI's. Without an engine, every installed runtime is possible. `exclusive` is a `domain.Exclusive` other than
    the machine. A server on another machine is only known by its own report, which `analyze` adds.
    """
    # llama.cpp's engines name it, all others are TensorRT-LLM's.
    version = None if engine is None else Fields.read_optional(engine, "config.json").values.get("version")
    llama = str(version).startswith("xllamacpp ")
    by_triton = not target.protocol.startswith("openai")
    idle = {
        "triton": not by_triton,
        "tensorrt_llm": llama,
        "xllamacpp": not by_triton or (engine is not None and not llama),
    }
    return {
        "server_on": "this machine" if _is_here(target.service) else ELSEWHERE,
        **{name: None if idle.get(name) else value for name, value in probe.here().items()},
        "exclusive": exclusive,
    }


def workload(
    target: Target,
    prompts: Sequence[Prompt],
    plan: Sequence[Level],
    synthetic: Mapping[str, Json] | None = None,
    repeats: str | None = None,
) -> dict[str, Json]:
    """The workload to be measured, by the names of FIELDS, and `levels` by those of LEVEL_FIELDS.

    `synthetic` has the target lengths of synthetic prompts, `repeats` the rule for more repeats than planned. If there
    is a prompt for each request, their number is that of the requests, and the digest describes their generation.
    """
    fresh = synthetic is not None and bool(synthetic.get("fresh"))
    limits = sorted({prompt.max_tokens or target.max_tokens for prompt in prompts})
    planned = Counter((level.concurrency, level.request_rate) for level in plan)
    levels: list[Json] = [
        {
            "concurrency": level.concurrency,
            "request_rate": level.request_rate,
            "requests": len(level.measured) if level.seconds is None else f"{level.seconds:g} s",
            "warmup_requests": len(level.warmup)
            if level.least_warmup is None
            else f"{level.least_warmup} to {len(level.warmup)}, until TTFT is flat",
            "repeats": repeats or planned[level.concurrency, level.request_rate],
            "arrivals_digest": _digest(list(level.at_s)) if level.at_s else None,
            "max_in_flight": level.max_in_flight,
            "turn_delay_s": level.turn_delay_s or None,
            "trace_speed": level.trace_speed,
        }
        for level in plan
        if level.repeat == 0
    ]
    options: dict[str, Json] = {
        name: value if isinstance(value, (str, int, float)) else list(value)
        for name, value in target.options.items()
        if not isinstance(value, Mapping)  # an adapter is part of the measured model, not a condition
    }
    return {
        "prompts": None if fresh else len(prompts),
        "prompts_digest": _digest([prompts_digest(prompts[:1]), synthetic]) if fresh else prompts_digest(prompts),
        "synthetic": None if synthetic is None else dict(synthetic),
        "max_tokens": [limits[0], limits[-1]],
        "sampling": {
            "temperature": target.temperature,
            **options,
            **({"exact_length": True} if target.exact_length else {}),
            **({"stop_words": list(target.stop_words)} if target.stop_words else {}),
            **({"seed": target.seed} if target.seed else {}),
        },
        "protocol": target.protocol,
        "levels": levels,
    }


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Digest of the user's prompts: of chat messages, not of text rendered by a model's template."""
    return _digest(
        [
            [
                *(prompt.id, list(prompt.messages) or prompt.text, prompt.max_tokens, list(prompt.stop_words)),
                *([dict(prompt.request)] if prompt.request else ()),
            ]
            for prompt in prompts
        ]
    )


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _is_here(service: Service) -> bool:
    """True if the server's address belongs to this machine, so that a socket can be bound to it."""
    url = service.http or service.grpc
    host = urlsplit(url if "://" in url else f"//{url}").hostname or ""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as one:
            one.bind(address)
    except OSError:
        return False
    return True


# Reading


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of a cell's measurements. None if not recorded."""

    measured_s: float | None = None
    """Unix time at which the load run started."""
    system: Mapping[str, Json] | None = None
    workload: Mapping[str, Json] | None = None
    questions: Mapping[str, Json] | None = None
    """`digest` and `max_tokens` of an accuracy measurement."""
    made_on: Mapping[str, Mapping[str, Json]] = dataclass_field(default_factory=dict)
    """`preparation` and `accuracy` -> the system that built the engine and generated the answers, for a cell without a load run."""

    @staticmethod
    def read(data: object) -> Conditions:
        """The conditions in a perf.json, or in a cell of a report. Malformed ones count as not recorded."""
        if not isinstance(data, dict):
            return Conditions()
        moment = data.get("measured_s")
        known = isinstance(moment, (int, float)) and not isinstance(moment, bool) and 0 <= moment < _YEAR_9999_S
        parts = {name: part if isinstance(part := data.get(name), dict) else None for name in (*GROUPS, "questions")}
        made_on = made_on if isinstance(made_on := data.get("made_on"), dict) else {}
        systems = {str(stage): each for stage, each in made_on.items() if isinstance(each, dict)}
        return Conditions(float(str(moment)) if known else None, **parts, made_on=systems)

    def to_json(self) -> dict[str, Json]:
        """As in report.json."""
        parts = {name: getattr(self, name) for name in (*GROUPS, "questions")}
        return {
            "measured_s": self.measured_s,
            **{name: part and dict(part) for name, part in parts.items()},
            "made_on": {stage: dict(each) for stage, each in self.made_on.items()},
        }

    def value(self, field: Field) -> Json:
        """The value of one of FIELDS. UNKNOWN if its whole group is."""
        group = self.system if field.about == "system" else self.workload
        return UNKNOWN if group is None else group.get(field.name)

    def shown(self, field: Field) -> str:
        return field.shown(self.value(field))

    def level(self, concurrency: int | None, request_rate: float | None) -> Mapping[str, Json]:
        """The workload of one level. Empty if it was not recorded."""
        levels = (self.workload or {}).get("levels")
        wanted = (concurrency, request_rate)
        for entry in levels if isinstance(levels, list) else ():
            if isinstance(entry, dict) and (entry.get("concurrency"), entry.get("request_rate")) == wanted:
                return entry
        return {}


# Judging


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two measurements differ, in words."""

    field: Field
    base: str
    new: str
    place: str = ""
    """The level of a level's difference: "concurrency 4"."""

    @property
    def names(self) -> frozenset[str]:
        """Names that `--allow` accepts for it."""
        one_sided = self.field.name in RUNTIMES and "-" in {self.base, self.new}
        return frozenset({self.field.about, self.field.name} | ({"server"} if one_sided else set()))

    def __str__(self) -> str:
        """`CPU: X in the baseline, Y here`."""
        at = f" at {self.place}" if self.place else ""
        both = f"{self.base} on either side" if self.base == self.new else ""
        return f"{self.field.label}{at}: {both or f'{self.base} in the baseline, {self.new} here'}"

    def to_json(self) -> dict[str, Json]:
        """As in a comparison's JSON."""
        return {
            "about": self.field.about,
            "field": self.field.name,
            "label": self.field.label,
            "level": self.place or None,
            "base": self.base,
            "new": self.new,
        }


def differences(
    new: Conditions, base: Conditions, levels: Iterable[tuple[int | None, float | None, str]] = ()
) -> tuple[Difference, ...]:
    """All differences between two load runs. `levels` (concurrency, rate, name) are those present in both."""
    result = []
    for about in GROUPS:
        of_group = [field for field in FIELDS if field.about == about]
        result += _of_group(about, of_group, getattr(base, about), getattr(new, about))
    if base.workload is not None and new.workload is not None:
        for concurrency, rate, place in levels:
            before, after = base.level(concurrency, rate), new.level(concurrency, rate)
            for field in LEVEL_FIELDS:
                result += _differ(field, before.get(field.name), after.get(field.name), place)
    return tuple(result)


def _of_group(
    about: str, fields: Iterable[Field], base: Mapping[str, Json] | None, new: Mapping[str, Json] | None
) -> list[Difference]:
    if base is None or new is None:
        words = (UNKNOWN if side is None else "recorded" for side in (base, new))
        return [Difference(Field(about, f"the {about}", "system" if about == "system" else "workload"), *words)]
    return [each for field in fields for each in _differ(field, base.get(field.name), new.get(field.name))]


def of_makers(new: Conditions, base: Conditions, stages: Iterable[str]) -> tuple[Difference, ...]:
    """Differences between the systems that built the artifacts of `stages`. An unrecorded system counts as a difference.

    A cell with a load run only has that run's system: an installed runtime that does not serve is no difference.
    """
    result: list[Difference] = []
    for stage in stages:
        after, before = (each.made_on.get(stage, each.system) for each in (new, base))
        one_sided = {
            name
            for name in (*RUNTIMES, "server_on", "server")
            if None in ((after or {}).get(name), (before or {}).get(name))
        }
        fields = [field for field in FIELDS if field.about == "system" and field.name not in one_sided]
        result += _of_group("system", fields, before, after)
    return tuple(dict.fromkeys(result))


def of_questions(new: Conditions, base: Conditions) -> tuple[Difference, ...]:
    """Differences between the questions of two scores."""
    return tuple(_of_group("questions", QUESTION_FIELDS, base.questions, new.questions))


def _differ(field: Field, base: Json, new: Json, place: str = "") -> list[Difference]:
    if field.name == "server_on" and ELSEWHERE in (base, new):
        nothing = f"{ELSEWHERE} (unknown system)"
        before, after = (nothing if side == ELSEWHERE else str(side) for side in (base, new))
        return [Difference(field, before, after, place)]
    if base == new:
        return []
    return [Difference(field, field.shown(base), field.shown(new), place)]


def deciding(
    found_differences: Iterable[Difference], allow: Collection[str], axes: Collection[str] = ()
) -> tuple[Difference, ...]:
    """The differences that make two measurements incomparable.

    `allow` names groups or fields that may differ; `axes` are the matrix axes under comparison.
    """
    return tuple(
        each
        for each in found_differences
        if each.field.decides and not each.names & set(allow) and not each.field.explained_by(axes)
    )


# In words


def common(every: Sequence[Conditions]) -> dict[str, Json]:
    """Name -> value of the fields on which all agree."""
    return {
        field.name: every[0].value(field)
        for field in FIELDS
        if every and all(each.value(field) == every[0].value(field) for each in every)
    }


def system_words(each: Conditions) -> str:
    """A system in one line: "AMD EPYC, 2 cores, 24 GiB; server triton 2.51.0; ..."."""
    return UNKNOWN if each.system is None else f"{machine_words(each)}; {version_words(each)}".removesuffix("; ")


def machine_words(each: Conditions) -> str:
    """The hardware of a measurement: "AMD EPYC, 2 cores, 24 GiB; 1 x NVIDIA H200, 140 GiB"."""
    if each.system is None:
        return UNKNOWN
    known = _known(each.system)
    parts = [f"{known.get('cpu', '-')}, {known.get('cores', '-')} cores, {known.get('memory_gib', '-')}"]
    gpus = each.system.get("gpus")
    if isinstance(gpus, list) and gpus:
        parts.append(", ".join(f"{times} x {name}" for name, times in Counter(map(str, gpus)).items()))
    if each.system.get("server_on") == ELSEWHERE:
        parts[0] = f"server on another machine (unknown system); client on {parts[0]}"
    return "; ".join(parts)


def version_words(each: Conditions) -> str:
    """The software of a measurement: "server triton 2.51.0; installed Triton ...; Python 3.11.7"."""
    if each.system is None:
        return UNKNOWN
    known = _known(each.system)
    plain = {"os", "kernel"}
    return "; ".join(
        known[field.name] if field.name in plain else f"{field.label} {known[field.name]}"
        for field in FIELDS
        if field.about == "system" and field.name in known and field.name not in _HARDWARE
    )


_HARDWARE: Final = {"server_on", "cpu", "cores", "memory_gib", "gpus"}


def _known(system: Mapping[str, Json]) -> dict[str, str]:
    return {field.name: field.shown(value) for field in FIELDS if (value := system.get(field.name)) is not None}


def workload_words(each: Conditions) -> str:
    """A load in one line: "24 prompts (digest 0f3a...), max_tokens 16, ...; concurrency 4: 64 requests, ..."."""
    if each.workload is None:
        return UNKNOWN
    load = {field.name: field.shown(each.workload.get(field.name)) for field in FIELDS if field.about == "workload"}
    made_up = f" ({load['synthetic']})" if each.workload.get("synthetic") else ""
    kind = f"{load['prompts']} {'synthetic ' if made_up else ''}prompts"
    if each.workload.get("prompts") is None:
        kind = "a synthetic prompt for each request"
    parts = [
        f"{kind}{made_up}, digest {load['prompts_digest']}",
        f"max_tokens {load['max_tokens']}",
        load["sampling"],
        load["protocol"],
    ]
    levels = each.workload.get("levels")
    alike: dict[tuple[str, ...], list[Mapping[str, Json]]] = {}
    for entry in levels if isinstance(levels, list) else ():
        if isinstance(entry, dict):
            key = tuple(str(entry.get(name)) for name in ("requests", "repeats", "max_in_flight", "turn_delay_s"))
            alike.setdefault(("" if entry.get("request_rate") is None else "rate", *key), []).append(entry)
    for (rate, requests, repeats, in_flight, turn_delay_s), entries in alike.items():
        places = ", ".join(_plain(entry.get("request_rate" if rate else "concurrency")) for entry in entries)
        warm = list(dict.fromkeys(str(entry.get("warmup_requests")) for entry in entries))
        counts = [count for each in warm for count in each.partition(", ")[0].split(" to ")]
        until = warm[0].partition(", ")[1:]
        count = requests if requests.endswith(" s") else f"{requests} requests"
        load_text = f"{count} after {' to '.join(dict.fromkeys((counts[0], counts[-1])))} of warmup{''.join(until)}"
        load_text += "" if in_flight == "None" else f", at most {in_flight} in flight"
        load_text += "" if turn_delay_s == "None" else f", {turn_delay_s} s between turns"
        place = f"{places} requests/s" if rate else f"concurrency {places}"
        often = f", {repeats} times" if repeats.isdigit() else f", repeated {repeats}"
        parts.append(f"{place}: {load_text}" + (often if repeats != "1" else ""))
    return "; ".join(parts)
