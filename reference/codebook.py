"""Lloyd-Max codebooks for one coordinate of a random point on the sphere.

After the rotation each coordinate of a vector of norm sqrt(D) follows the density proportional to
(1 - t^2 / D)^((D - 3) / 2): a Beta law that tends to the normal one (arXiv 2504.19874, lemma 1).  The Lloyd-Max
quantizer is the scalar quantizer of least mean squared error for it: every boundary lies midway between two centroids,
every centroid is the mean of its cell.  Both conditions are solved with SciPy.

What runs at quantization time are the integers in `codebooks.json` (docs/numerics.md, section 3.5); the solver is here
to regenerate and to check them: `python -m turboquant_vlm.reference.codebook` rewrites the file.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from .rotation import supported_dims

TABLE = "codebooks.json"
TABLE_BITS = (1, 2, 3, 4, 5, 6)

Floats = npt.NDArray[np.float64]


def _cell_mass_and_moment(edges: Floats, dim: int) -> tuple[Floats, Floats]:
    """Integrals of the density and of t times the density over the cells between `edges`."""
    half = (dim - 1) / 2
    # With t = sqrt(D) (2 u - 1), u follows Beta(half, half).
    u = np.clip((edges / np.sqrt(dim) + 1) / 2, 0, 1)
    mass = np.diff(special.betainc(half, half, u))
    log_constant = special.gammaln(dim / 2) - special.gammaln(half) - 0.5 * np.log(np.pi)
    antiderivative = -np.sqrt(dim) * np.exp(log_constant) * (4 * u * (1 - u)) ** half / (dim - 1)
    return mass, np.diff(antiderivative)


def solve(dim: int, bits: int) -> Floats:
    """Positive centroids in units of the coordinate's standard deviation: float64 [2^(bits - 1)], ascending.

    Lloyd's iteration from quantiles, then a root finder on its fixed point equation.
    """
    count = 2 ** (bits - 1)
    top = np.sqrt(dim)

    def lloyd(centroids: Floats) -> Floats:
        edges = np.concatenate([[0.0], (centroids[1:] + centroids[:-1]) / 2, [top]])
        mass, moment = _cell_mass_and_moment(edges, dim)
        return np.asarray(moment / mass, np.float64)

    quantiles = special.betaincinv((dim - 1) / 2, (dim - 1) / 2, 0.5 + (np.arange(count) + 0.5) / (2 * count))
    centroids: Floats = np.sqrt(dim) * (2 * quantiles - 1)
    for _ in range(200):
        centroids = lloyd(centroids)
    if count > 1:
        solution = optimize.root(lambda c: lloyd(c) - c, centroids, tol=1e-14)
        centroids = np.asarray(solution.x, np.float64)
    residual = float(np.max(np.abs(lloyd(centroids) - centroids)))
    if residual > 1e-10:
        raise ArithmeticError(f"Lloyd-Max did not converge for dim={dim}, bits={bits}: residual {residual:.1e}")
    return centroids


def distortion(dim: int, bits: int) -> float:
    """Mean squared error of the exact Lloyd-Max quantizer on unit vectors (the norm known)."""
    centroids = solve(dim, bits)
    edges = np.concatenate([[0.0], (centroids[1:] + centroids[:-1]) / 2, [np.sqrt(dim)]])
    mass, moment = _cell_mass_and_moment(edges, dim)
    # E t^2 = 1, and E (t - c)^2 = E t^2 - sum of moment * centroid at the fixed point.
    return float(1 - 2 * np.sum(2 * moment * centroids - mass * centroids**2))


def integer_codebook(dim: int, bits: int) -> tuple[list[int], int]:
    """(positive centroids as integers with the largest 127, K = round(2^20 c_max / 254))."""
    centroids = solve(dim, bits)
    largest = float(centroids[-1])
    return [round(127 * float(c) / largest) for c in centroids], round(2**20 * largest / 254)


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, tuple[list[int], int]]]:
    text = resources.files(__package__).joinpath(TABLE).read_text(encoding="utf-8")
    loaded: dict[str, dict[str, tuple[list[int], int]]] = json.loads(text)["codebooks"]
    return loaded


@cache
def magnitudes(dim: int, bits: int) -> npt.NDArray[np.int32]:
    """The committed positive centroids, ascending by rank: int32 [2^(bits - 1)]."""
    return np.array(_table()[str(dim)][str(bits)][0], np.int32)


@cache
def centroids_ascending(dim: int, bits: int) -> npt.NDArray[np.int32]:
    """All 2^bits centroids, ascending."""
    positive = magnitudes(dim, bits)
    return np.concatenate([-positive[::-1], positive])


def boundary_constant(dim: int, bits: int) -> int:
    """K of section 3.5: turns the rms of a vector into its quantization boundaries."""
    return int(_table()[str(dim)][str(bits)][1])


def write_table(path: Path) -> None:
    """Solve every codebook and write the JSON table."""
    rows = []
    for dim in supported_dims():
        books = {str(bits): integer_codebook(dim, bits) for bits in TABLE_BITS}
        rows.append(f'"{dim}": {json.dumps(books)}')
    comment = "Lloyd-Max centroids (positive half, largest 127) and K per head size and bits; see codebook.py"
    body = ",\n".join(rows)
    path.write_text(f'{{"comment": "{comment}", "codebooks": {{\n{body}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    write_table(Path(__file__).with_name(TABLE))
