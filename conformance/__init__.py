"""The judge: an independent oracle of docs/numerics.md, vectors made by it, and a runner for any backend.

    python -m turboquant_vlm.conformance --backend reference --random 2000

The oracle (``oracle_*.py``) was written from the contract alone and shares no code with ``reference/``. :func:`run_suite`
compares a backend with it bit by bit.
"""
