"""Repair a Cholesky factorisation under way: recompute what is wrong from A, left-looking.

With L(:, :j) right, everything else follows from A alone:

    panel:          A(j:, J) - L(j:, :j) L(J, :j)'
    finished l:     (A(l:, l) - L(l:, :l) L(l, :l)') / l_ll,  with l_ll the root of its first element

A finished column that is computed again differs from the old one by rounding, which the columns after it have not seen:
that moves A - L L' by up to sqrt(a_ll) / l_ll roundings, since |l_cl| <= sqrt(a_cc). Where it is too much, all that
follows has to be computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, from_host, to_host
from abft_tsm2.checksum.bounds import definite_bound, definite_element, stored_bound
from abft_tsm2.core.blas import add_product, factor_columns, factored, like_columns, product
from abft_tsm2.linalg.cholesky_checks import CholeskyChecksums, symmetric_columns, symmetric_sums, weighting
from abft_tsm2.linalg.encode import wide
from abft_tsm2.linalg.line_check import LineCheck
from abft_tsm2.linalg.operand import moved
from abft_tsm2.linalg.outcome import ROUNDS, Findings, Unrepairable, differing, largest

MOVED = 8.0  # roundings that a finished column may bring when it is computed again: few, beside those that are granted


class NotDefinite(Exception):
    """A leading minor of A, of this order, is not positive."""


@dataclass(eq=False)
class CholeskyRepair:
    """Repairs the lower triangle of W, which becomes L, and its checksums.

    Attributes
    ----------
    state : CholeskyChecksums
    findings : Findings
    """

    state: CholeskyChecksums
    findings: Findings

    # -- sums --

    def sums(self) -> None:
        """Compare w and Z of A with their copies, and repair them: where two differ, what A gives decides."""
        kept, A = self.state.kept, self.state.A
        for at, name in enumerate(("w", "Z of A")):
            live, copy = (kept.w, kept.Z)[at], kept.copies[at]
            differ = np.flatnonzero(to_host(live) != to_host(copy))
            if not differ.size:
                continue
            xp = self.state.xp
            again = symmetric_sums(A, kept.w) if at else weighting(kept.roots)
            bound = self._noise() if at else xp.zeros_like(live)
            # both may lie within the bound: of each pair the one that is nearer was not hit
            far = [xp.where(xp.isnan(x), xp.full_like(x, xp.inf), xp.abs(x - again)) for x in (live, copy)]
            right = xp.where(far[0] <= far[1], live, copy)
            lines = from_host(differ, live)
            if not LineCheck.of(xp.take(right - again, lines), xp.take(bound, lines)).clean:
                raise Unrepairable(f"{name} and its copy differ in {differ.size} places, and neither is what A gives")
            off = largest(to_host(live - copy)[differ])
            live[...] = copy[...] = right
            self.findings.wrong_sums(name, differ, off, "taken from its copy")

    def _noise(self) -> Array:
        """How far two sums over a line of A may be apart."""
        kept = self.state.kept
        return stored_bound(4 * kept.norms, kept.norms.shape[0])

    def verify_input(self) -> None:
        """Verify A against its sums; raise InputChanged where it is A that differs."""
        self.sums()
        self.compare_input(self.state.kept.w, self.state.kept.Z)

    def compare_input(self, w: Array, Z: Array) -> None:
        """Raise InputChanged where A's sums with these weights are not Z."""
        A = self.state.A
        if moved(Z, symmetric_sums(A, w), lambda lines: symmetric_columns(A, lines) * w[:, None]).size:
            self.findings.input_changed()

    def _Z(self, j: int, j1: int) -> None:
        """Repair Z(j:j1), from the sums of A and the finished columns."""
        state = self.state
        now, then = state.Z[j:j1], state.xp.asarray(state.kept.Z[j:j1], copy=True)
        add_product(then, wide(state.W[j:j1, :j]), state.g[:j])
        size = state.xp.maximum(state.kept.norms[j:j1], state.xp.abs(then))
        verdict = LineCheck.of(now - then, definite_bound(state.type, size, j1, state.W.shape[0], state.modulus))
        if not verdict.clean:
            off = largest(to_host(verdict.residual))
            self.findings.wrong_sums("Z", np.flatnonzero(~to_host(verdict.ok)) + j, off)
        now[...] = then

    # -- the panel --

    def before(self, j: int, j1: int) -> None:
        """Repair what the check of the columns j:j1 rests on: A's sums, what is finished, and Z."""
        self.verify_input()
        self.finished(j)
        self._Z(j, j1)

    def panel(self, j: int, j1: int, failed: int) -> int:
        """Factor the columns j:j1 again, from A: they are wrong, or the factorisation has stopped there.

        Parameters
        ----------
        failed : int
            The minor of their corner at which the factorisation stopped, or 0.

        Returns
        -------
        stopped : int
            As `failed`, of what has been computed again, elsewhere in memory.

        Raises
        ------
        NotDefinite
            It stops at the same minor again.
        """
        state, findings = self.state, self.findings
        xp, W, b = state.xp, state.W, j1 - j
        X, size = self._rebuilt(j, j1)
        done = factored(failed, b)
        panel = xp.tril(wide(W[j:, j:j1]))
        old = product(panel[:, :done], panel[:b, :done].T)
        old[done:, done:] += panel[done:, done:]
        new = like_columns(W, X.shape)
        new[...] = xp.astype(X, W.dtype)
        stopped = factor_columns(new)
        size = size + self._product_sizes(xp.tril(wide(new))[:, : factored(stopped, b)], j, b)
        differ, distance = differing(old, X, definite_element(state.type, size, j1))
        at = np.arange(done)
        differ[at, at] |= ~(to_host(xp.linalg.diagonal(panel))[:done] > 0)
        if stopped and stopped == failed and not np.tril(differ).any():
            raise NotDefinite(j + stopped)
        findings.wrong_elements(np.tril(differ), distance, (j, j))
        W[j:j1, j:j1] = xp.tril(new[:b, :]) + xp.triu(W[j:j1, j:j1], k=1)
        W[j1:, j:j1] = new[b:, :]
        return stopped

    def _product_sizes(self, left: Array, j: int, b: int) -> Array:
        """The root of ``(L o L)(L1 o L1)'`` for some columns of L, rows j and below, the first b of which are L1."""
        xp, roots = self.state.xp, self.state.kept.roots[j:]
        squares = (left / roots[:, None]) ** 2
        return xp.sqrt(product(squares, squares[:b, :].T)) * roots[:, None] * roots[:b][None, :]

    def _rebuilt(self, j: int, j1: int) -> tuple[Array, Array]:
        """A(j:, j:j1) - L(j:, :j) L(j:j1, :j)', and the sizes of what was added up there."""
        state, b = self.state, j1 - j
        X = symmetric_columns(state.A, np.arange(j, j1), j)
        sizes = state.xp.abs(X)
        if j:
            left = wide(state.W[j:, :j])
            X = X - product(left, left[:b, :].T)
            sizes = sizes + self._product_sizes(left, j, b)
            self.findings.multiplications += 2.0 * left.shape[0] * j * b
        return X, sizes

    # -- what is finished --

    def finished(self, count: int) -> None:
        """Repair the first `count` columns of L, and their g."""
        self.sums()
        for _ in range(ROUNDS):
            now, _back = self.state.read(count)
            columns = self.state.changed(now)
            if not columns:
                return
            self.verify_input()
            for c in columns:
                self._column(c, float(now[c]))
        raise Unrepairable(f"sums of L still differ after {ROUNDS} repairs")

    def _column(self, c: int, now: float) -> None:
        """Repair a column of L whose sum is no longer g(c), or g(c)."""
        state, found = self.state, self.compared(c, now)
        if not found.wrong:
            self.wrong_g(c, now)
            return
        self.findings.wrong_elements(found.differ[:, None], found.distance[:, None], (c, c))
        if not float(state.kept.roots[c]) <= MOVED * found.root:
            raise Unrepairable(f"column {c} of L has changed, and is not determined well enough by A to go on from")
        state.W[c:, c] = state.xp.astype(found.new, state.W.dtype)
        state.g[c] = state.xp.sum(wide(state.W[c:, c]) * state.w[c:])

    def wrong_g(self, c: int, now: float) -> None:
        off = abs(now - float(self.state.g[c]))
        self.state.g[c] = now
        self.findings.wrong_sums("g", [c], off)

    def compared(self, c: int, now: float) -> Column:
        """Column c of L computed again; where its sum is `now`, and not g(c), two of three sums agree."""
        state = self.state
        X, sizes = self._rebuilt(c, c + 1)
        left = float(X[0, 0])
        if not left > 0.0:
            raise Unrepairable(f"column {c} of L cannot be computed again: what remains of its diagonal is {left}")
        root = left**0.5
        new, bound = X[:, 0] / root, definite_element(state.type, sizes[:, 0], c + 1) / root
        differ, distance = differing(wide(state.W[c:, c]), new, bound)
        again, wrong = float(state.xp.sum(new * state.w[c:])), bool(differ.any())
        if not wrong and abs(again - float(state.g[c])) <= abs(again - now):
            differ[int(np.argmax(np.where(np.isfinite(distance), distance, 0.0)))] = wrong = True
        return Column(new, root, wrong, differ, distance)


class Column(NamedTuple):
    """A column of L that has been computed again: from the diagonal on, which is `root`; whether the old one was wrong,
    where, and how far off it was."""

    new: Array
    root: float
    wrong: bool
    differ: Any
    distance: Any
