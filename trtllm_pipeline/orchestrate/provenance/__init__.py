"""The provenance of an artifact (inputs, user, machine) as a statement that can be signed and checked.

    statement = statement_of(folder)            derived from the manifest and the job, never stored unsigned
    sign(store, folder, key)                    stored next to the manifest, as a DSSE envelope
    check(folder, policy) -> findings           compares the envelope with the files and the policy
    require(folders, policy)                    the same, raised as an error

`docs/reference/provenance.md` explains what this proves and what it cannot prove.
"""

from trtllm_pipeline.orchestrate.provenance.checking import Policy, check, look, policy, require, require_folders
from trtllm_pipeline.orchestrate.provenance.described import Described, envelope_of, read_file, statement_line
from trtllm_pipeline.orchestrate.provenance.dsse import SigningKey
from trtllm_pipeline.orchestrate.provenance.signing import attach, sign
from trtllm_pipeline.orchestrate.provenance.statement import statement_of

__all__ = [
    "Described",
    "Policy",
    "SigningKey",
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
