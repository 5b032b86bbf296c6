"""Finds and reads recipes: next to the matrix, shipped with the package, or derived from a local directory's config.json."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.base import DownloadError, Fault, Json, MatrixError, UsageError
from trtllm_pipeline.orchestrate.matrix.document import SUFFIXES, Document, KeyPath, Origin, nearest, read

if TYPE_CHECKING:
    from trtllm_pipeline.models import QuantizedWeights
    from trtllm_pipeline.orchestrate.matrix.models import Recipe

_ADDRESS = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/]+/[^/?#]+)")
_ON_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/([\w.-]+))(?:@([A-Za-z0-9][\w./-]*))?")
"""ORGANIZATION/NAME[@REVISION] on the Hugging Face Hub."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Keys in both config.json and recipes.
_SAME_NAME: Final = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    *("kv_lora_rank", "qk_rope_head_dim", "q_lora_rank", "index_head_dim"),
    *("moe_intermediate_size", "n_shared_experts", "first_k_dense_replace", "interleave_moe_layer_step"),
    *("num_experts_per_tok", "num_nextn_predict_layers"),
)


def load_recipe(path: Path) -> Recipe:
    """The recipe in a file. Raises MatrixError with all faults."""
    recipe, faults = check_recipe(read(path), path)
    if faults or recipe is None:
        raise MatrixError(tuple(faults))
    return recipe


def check_recipe(document: Document, path: Path | None) -> tuple[Recipe | None, list[Fault]]:
    """A recipe's data as a model, and its faults. If the recipe is a file, its name must be the file's."""
    from trtllm_pipeline.orchestrate.matrix.document import check  # pydantic models are not needed to list recipes
    from trtllm_pipeline.orchestrate.matrix.models import Recipe

    recipe, faults = check(Recipe, document)
    if recipe is not None and path is not None and recipe.name != path.stem:
        faults.append(document.fault(("name",), f"must be {path.stem!r}, as the file is called"))
    if recipe is not None and recipe.code_files:
        from trtllm_pipeline.models import COMMIT

        if not COMMIT.fullmatch(getattr(recipe.sources[0], "revision", "")):
            message = "needs a first source on a hub with a commit as its revision"
            faults.append(document.fault(("code_files",), message))
    return recipe, faults


def recipes_folder() -> Path:
    """Directory of the shipped recipes."""
    return _shipped("recipes")


def matrices_folder() -> Path:
    """Directory of the shipped matrices."""
    return _shipped("matrices")


def list_recipes(directory: Path) -> dict[str, Path]:
    """Recipes by name: those in `directory/recipes` and the shipped ones. A local recipe hides a shipped one with its name."""
    own = [path for path in sorted((directory / "recipes").glob("*")) if path.suffix in SUFFIXES]
    return dict(sorted({path.stem: path for path in (*recipes_folder().rglob("*.yaml"), *own)}.items()))


def find_recipe(name: str, directory: Path, *, but: Path | None = None) -> Path:
    """File of a recipe: `recipes/NAME.yaml` or `NAME.yaml` in `directory`, or the shipped one.

    A matrix in the same directory may have a recipe's name, so `but` and files with axes are skipped. Raises UsageError
    with the nearest name.
    """
    if _NAME.fullmatch(name):
        for folder in (directory / "recipes", directory):
            for path in (folder / f"{name}{suffix}" for suffix in SUFFIXES):
                if path != but and path.is_file() and not _is_matrix(path):
                    return path
    known = list_recipes(directory)
    if _NAME.fullmatch(name) and name in known:
        return known[name]
    raise UsageError(
        f"there is no recipe {name!r}{nearest(name, known)}",
        hint="use a name from `pipeline models list`, ORGANIZATION/NAME on the Hugging Face Hub, or a directory: ./my-model",
    )


def sources_of(model: str, directory: Path) -> list[dict[str, Json]]:
    """The sources of a model given as a recipe, a directory, or ORGANIZATION/NAME[@REVISION]. Raises UsageError."""
    name, _, revision = model.partition("@")
    recipes = list_recipes(directory)
    if model in recipes:
        recipe = load_recipe(find_recipe(model, directory))
        return [source.model_dump(mode="json", exclude={"note"}) for source in recipe.sources]
    if (directory / model).is_dir() or model.startswith(("./", "../", "/", "~")):
        return [{"local": str((directory / Path(model).expanduser()).absolute())}]
    if name in recipes:
        raise UsageError(
            f"{model}: {name} is a recipe, which has its own source and revision",
            hint=f"see pipeline models show {name}, or give ORGANIZATION/NAME@REVISION",
        )
    if name.count("/") == 1:
        return [{"hugging_face": name, "revision": revision or "main"}]
    raise UsageError(
        f"{model}: neither a recipe nor a directory",
        hint="use a name from pipeline models list, or ORGANIZATION/NAME for a model on the Hugging Face Hub",
    )


def is_folder(model: str, base: Path) -> bool:
    """True if a value of the model axis is the path of a local directory. Relative paths start at `base`."""
    if model.startswith((".", "/", "~")) or "\\" in model:
        return True
    return "/" in model and (_ON_HUB.fullmatch(model) is None or (base / model).is_dir())


def is_recipe_name(model: str) -> bool:
    """True if a value of the model axis can be the name of a recipe."""
    return _NAME.fullmatch(model) is not None


def recipe_document(model: str, matrix: Path, *, offline: bool) -> tuple[Document, Path | None]:
    """The recipe of a value of the model axis, and its file if it is a recipe.

    A local directory, and a model on the hub without a recipe, get one from their config.json. Raises UsageError,
    MatrixError, DownloadError.
    """
    base = matrix.parent
    if (address := _ADDRESS.match(model)) is not None:
        raise UsageError(f"{model!r} is an address; a model is named by its repository", hint=f"write {address[1]}")
    if is_folder(model, base):
        return _recipe_of_folder(model, base), None
    if (on_hub := _ON_HUB.fullmatch(model)) is None:
        path = find_recipe(model, base, but=matrix)
        return read(path), path
    repository, name, revision = on_hub[1], on_hub[2], on_hub[3]
    if (known := _recipe_with_source(repository, base)) is not None:
        return (known, Path(known.name)) if revision is None else (_at_revision(known, repository, revision), None)
    from trtllm_pipeline.models import peek

    source: dict[str, Json] = {"hugging_face": repository, "revision": revision or "main"}
    config = peek.configuration(source, "config.json", folder=None, offline=offline)
    if config is None:
        raise UsageError(f"{model}: Hugging Face has no config.json for it", hint="check its name and revision")
    called = name if revision is None else f"{name}-{revision}"
    read_from = Document(f"config.json of {model}", dict(config))
    weights = None
    with suppress(DownloadError):  # pinning reports it
        weights = peek.quantized(source, folder=None, offline=offline)
    return _recipe_of_config(read_from, called, f"{repository} on the Hugging Face Hub", source, weights), None


def _recipe_with_source(repository: str, base: Path) -> Document | None:
    """The recipe whose first source is this repository of the Hugging Face Hub."""
    for path in list_recipes(base).values():
        if repository.encode() in path.read_bytes():
            document = read(path)
            if document.get(("sources", 0, "hugging_face")) == repository:
                return document
    return None


def _at_revision(known: Document, repository: str, revision: str) -> Document:
    """A recipe with another revision of its repository. Digests and files of code belong to the recipe's own."""
    assert isinstance(known.data, dict)
    of_commit = {"code_files", "sources"}
    data: dict[str, Json] = {name: value for name, value in known.data.items() if name not in of_commit}
    data |= {
        "name": f"{data['name']}-{_called(revision)}",
        "sources": [{"hugging_face": repository, "revision": revision}],
    }
    return Document(known.name, data, known.origins)


def _recipe_of_folder(model: str, base: Path) -> Document:
    """Recipe data derived from a Hugging Face directory's config.json. Raises MatrixError if the file cannot be read."""
    from trtllm_pipeline.models import peek

    model = os.path.expanduser(model)  # noqa: PTH111  (Path.expanduser raises for an unknown user)
    folder = base / model
    name = folder.name if folder.name not in ("", "..") else folder.resolve().name
    source: dict[str, Json] = {"local": model}
    weights = peek.quantized(source, folder=folder, offline=True)
    return _recipe_of_config(read(folder / "config.json"), name, f"Local directory {model}", source, weights)


def _recipe_of_config(
    config: Document, name: str, summary: str, source: dict[str, Json], weights: QuantizedWeights | None
) -> Document:
    from trtllm_pipeline.models import Form

    recipe = _recipe_of(config.data if isinstance(config.data, dict) else {}, name, summary)
    recipe["sources"] = [source]
    if weights is not None and weights.form in get_args(Form):  # decides which toolchain `auto` is
        recipe["quantization"] = weights.form
    origins: dict[KeyPath, Origin] = {path: origin for path, origin in config.origins.items() if len(path) == 1}
    return Document(config.name, recipe, origins)


def numbers_of(model: str, config: Mapping[str, Json] | None, directory: Path) -> Mapping[str, Json]:
    """The recipe of a model: an existing recipe, or one derived from its config.json.

    Raises UsageError for a config.json that lacks required keys, and for None, which is a config.json that cannot be
    read now.
    """
    if model in list_recipes(directory):
        return load_recipe(find_recipe(model, directory)).model_dump(mode="json")
    if config is None:
        raise UsageError(
            f"{model}: its config.json cannot be read, because the hub cannot be reached",
            hint="give a recipe or a directory of the model",
        )
    made: dict[str, Json] = {**_recipe_of(config, model, model), "sources": [{"local": "."}]}
    recipe, faults = check_recipe(Document(f"config.json of {model}", made, {}), None)
    if recipe is None or faults:
        raise UsageError(
            f"{model}: {faults[0].message if faults else 'not a model'}", hint="give a recipe of the model"
        )
    return recipe.model_dump(mode="json")


def _recipe_of(config: Mapping[str, Json], name: str, summary: str) -> dict[str, Json]:
    """The data of a recipe without sources."""
    from trtllm_pipeline.models import model_files

    data: dict[str, Json] = model_files.named_alike(config)
    if isinstance(text := data.get("text_config"), dict):  # a model that accepts images
        data = {**text, **data}
    base, scaling = model_files.rotary(data)
    heads, hidden, eos = (data.get(key) for key in ("num_attention_heads", "hidden_size", "eos_token_id"))
    recipe: dict[str, Json] = {
        "name": _called(name),
        "summary": summary,
        "family": data.get("model_type"),
        "license": "unknown",
        **{key: data[key] for key in _SAME_NAME if key in data},
        **model_files.hybrid_layers(data),
        **(
            {"images": True, "vision_parameters": _vision_weights(data["vision_config"])}
            if "vision_config" in data
            else {}
        ),
        "num_key_value_heads": data.get("num_key_value_heads") or heads,
        "head_dim": data.get("head_dim")
        or data.get("v_head_dim")
        or (hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 else None),
        "num_experts": model_files.num_experts(data),
        "rope_theta": base,
        "rope_scaling": scaling,
        "eos_token_ids": [eos] if isinstance(eos, int) else eos,
    }
    if (shared := model_files.shared_experts(data)) is not None:
        recipe["n_shared_experts"] = shared
    if "intermediate_size" not in data and "moe_intermediate_size" in data:  # all layers have experts
        recipe["intermediate_size"] = data["moe_intermediate_size"]
    # Llama 4 has the width of its experts under the usual name.
    if isinstance(dense := data.get("intermediate_size_mlp"), int):
        experts = {"moe_intermediate_size": data.get("intermediate_size"), "n_shared_experts": 1}
        recipe |= {"intermediate_size": dense, **experts}
    return recipe


def _called(name: str) -> str:
    """A name that is valid in cell ids."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")[:100] or "local"


def _vision_weights(config: Json) -> int | None:
    """Weights of the layers of a vision transformer: attention, `4 h^2`, and MLP, `2 h i`, or `3 h i` if it is gated
    (silu).

    None for other architectures. The patch embedding and the projector, less than a tenth, are not counted.
    """
    if not isinstance(config, dict):
        return None
    width, layers, inner = (
        next((config[name] for name in names if config.get(name)), None)
        for names in (("embed_dim", "hidden_size"), ("depth", "num_hidden_layers"), ("intermediate_size",))
    )
    ratio = config.get("mlp_ratio")
    if inner is None and isinstance(width, int) and isinstance(ratio, (int, float)):
        inner = int(ratio * width)
    if not (isinstance(width, int) and isinstance(layers, int) and isinstance(inner, int)):
        return None
    matrices = 3 if config.get("hidden_act") == "silu" else 2
    return max(layers * (4 * width**2 + matrices * width * inner), 0) or None


def _shipped(what: str) -> Path:
    installed = PACKAGE / "data" / what  # in a wheel; a checkout has them at its root
    return installed if installed.is_dir() else PACKAGE.parent / what


def _is_matrix(path: Path) -> bool:
    try:
        if b"axes" not in path.read_bytes():  # most files are recipes, which are read again later
            return False
        data = read(path).data
    except (MatrixError, OSError):
        return False  # its faults are reported when it is read as a recipe
    return isinstance(data, dict) and "axes" in data
