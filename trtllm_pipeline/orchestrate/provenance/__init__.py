"""What an artifact was made from, by whom and where, as a statement that can be signed and checked.

    statement = statement_of(directory)            derived from the manifest and the job, never stored unsigned
    sign(store, artifact, key)                  stored beside the manifest, as a DSSE envelope
    check(artifact.folder, policy) -> findings  whether the envelope fits the files, and the policy
    require(directories, policy)                    the same, raised as an error

`docs/provenance.md` says what this proves and what it cannot.
"""

from trtllm_pipeline.orchestrate.provenance.checking import (
    Looked,
    Policy,
    Signed,
    check,
    look,
    policy,
    require,
    require_folders,
)
from trtllm_pipeline.orchestrate.provenance.described import Described, envelope_of, read_file, statement_line
from trtllm_pipeline.orchestrate.provenance.dsse import Envelope, SigningKey, TrustedKey
from trtllm_pipeline.orchestrate.provenance.signing import attach, sign
from trtllm_pipeline.orchestrate.provenance.statement import statement_of

__all__ = [
    "Described",
    "Envelope",
    "Looked",
    "Policy",
    "Signed",
    "SigningKey",
    "TrustedKey",
    "attach",
    "check",
    "envelope_of",
    "look",
    "policy",
    "read_file",
    "require",
    "require_folders",
    "sign",
    "statement_line",
    "statement_of",
]
