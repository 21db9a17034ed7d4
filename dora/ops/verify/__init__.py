"""``dora verify``: checks that a run record meets DORA's guarantees, token by token.

Every recorded logprob is recomputed with Hugging Face transformers under the weights of the recorded version. The
record itself is checked too: each trajectory occurs once, groups are complete, a trajectory has one version, staleness
is as stated, and every committed step has its groups and its version.
"""

from dora.ops.verify.check import VerifyReport, verify

__all__ = ["VerifyReport", "verify"]
