"""Container images that serve a bundle: NVIDIA's Triton with TensorRT-LLM by release, and ours for CPUs.

The table matches docs/reference/images.md, which names the source of each row; a test compares the two.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from trtllm_pipeline import __version__
from trtllm_pipeline.base import UsageError
from trtllm_pipeline.tensorrt import releases

TRITON: Final = "nvcr.io/nvidia/tritonserver"
FIRST_TRTLLM: Final = "0.20.0"
"""First release with its own image without Triton, for trtllm-serve."""
CPU: Final = f"trtllm-pipeline-cpu:{__version__}"
"""Built from `Dockerfile.cpu`: the embedded toolchain and the gateway. It is in no registry."""
TAGS: Final = {
    "0.8.0": "24.02",
    "0.9.0": "24.05",
    "0.10.0": "24.06",
    "0.11.0": "24.07",
    "0.12.0": "24.08",
    "0.13.0": "24.09",
    "0.14.0": "24.10",
    "0.15.0": "24.11",
    "0.16.0": "24.12",
    "0.17.0": "25.01",
    "0.17.0.post1": "25.02",
    "0.18.0": "25.03",
    "0.18.2": "25.04",
    "0.19.0": "25.05",
    "0.20.0": "25.07",
    "0.21.0": "25.08",
    "1.0.0": "25.10",
    "1.0.3.2510": "25.11",
    "1.1.0": "26.02",
    "1.2.0": "26.03",
    "1.2.1": "26.07",
}
"""Release of TensorRT-LLM -> the newest monthly Triton release whose image has it."""
_PART: Final = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_REFERENCE: Final = re.compile(
    rf"(?P<name>(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]+)?/)?{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
"""Source: the grammar of image references, github.com/distribution/reference."""


class ImageReference(NamedTuple):
    """The parts of an image reference."""

    name: str
    tag: str | None
    digest: str | None


def parts(image: str) -> ImageReference:
    """The parts of an image reference. Raises UsageError for other text."""
    match = _REFERENCE.fullmatch(image)
    if match is None:
        raise UsageError(
            f"--image {image!r}: expected [REGISTRY/]NAME[:TAG][@sha256:DIGEST], with a lower-case name",
            hint="for example registry.example.org/team/triton:24.12",
        )
    return ImageReference(match["name"], match["tag"], match["digest"])


def image_for(release: str, *, triton: bool) -> str:
    """The published image with exactly this release. Raises UsageError if none is known.

    An engine only runs with the release that built it, so a nearby release will not do.
    """
    if not triton:
        from packaging.version import Version

        if Version(release) >= Version(FIRST_TRTLLM):
            return f"{releases.IMAGE}:{release}"
    if release not in TAGS:
        raise UsageError(
            f"no image with TensorRT-LLM {release} is known",
            hint="specify yours: --image REGISTRY/NAME:TAG; docs/reference/images.md",
        )
    return f"{TRITON}:{TAGS[release]}-trtllm-python-py3"
