"""The judge: an independent oracle of docs/numerics.md, vectors made by it, and a runner for any backend.

    python -m turboquant_vlm.conformance --backend reference --random 2000

The oracle (``oracle_*.py``) was written from the contract alone and shares no code with ``reference/``.
:func:`run_suite` compares a backend with it bit by bit.
"""

from .compare import Difference, Words, compare
from .suite import CaseResult, Result, check, run_suite, vectors

__all__ = ["CaseResult", "Difference", "Result", "Words", "check", "compare", "run_suite", "vectors"]
