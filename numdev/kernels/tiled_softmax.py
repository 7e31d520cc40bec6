"""An online softmax over tiles of keys, and its gradients, bit for bit as autograd
computes them of the plain loop over tiles.

Its thousands of small operations are what the loop costs. So all that is elementwise, and
maxima, which are exact, are computed for all tiles at once; sums and products of matrices
tile by tile, each in its own shape, since their last bits may go with it.

    m_t = max(m_{t-1}, max S_t)    a_t = exp(m_{t-1} - m_t)    P_t = exp(S_t - m_t)
    l_t = a_t l_{t-1} + sum P_t    O_t = a_t O_{t-1} + cast(P_t) V_t"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class TiledSoftmax:
    """An online softmax over tiles of keys, computed when this is made. After the last
    tile, `m` is the maximum and `l` the sum [B, H, rows, 1], and `O` [B, H, rows,
    features] the product with V, not yet divided by l; all in float32."""

    def __init__(
        self, S: Tensor, V: Tensor, m: Tensor, tile: int, dtype: torch.dtype
    ) -> None:
        """`S` [B, H, rows, keys] and `V` [B, H, keys, features] in float32; `m`: the
        maximum to begin with, [B, H, rows, 1]; `tile`: keys in each tile, of which the
        last may have fewer; P is cast to `dtype` for its product."""
        self.S, self.tile, self.dtype, self.keys = S, tile, dtype, S.shape[-1]
        self.V = V.split(tile, dim=2)
        # Of each tile, [B, H, rows, tiles]
        self.largest, self.place = self._by_tile(S, -math.inf).max(dim=-1)
        self.met = torch.cat([m, self.largest], dim=-1).cummax(dim=-1).values
        self.a = (self.met[..., :-1] - self.met[..., 1:]).exp()
        self.P = (self.S - self._by_key(self.met[..., 1:])).exp()
        self.cast = [x.contiguous() for x in self._tiles(self.P.to(dtype).float())]
        # Before each tile, and after the last
        self.sums = [torch.zeros_like(m)]
        self.products = [m.new_zeros(*m.shape[:3], V.shape[-1])]
        tiles = zip(
            self._each(self.a), self._tiles(self.P), self.cast, self.V, strict=True
        )
        for a, P, rounded, values in tiles:
            self.sums.append(a * self.sums[-1] + P.sum(dim=-1, keepdim=True))
            self.products.append(a * self.products[-1] + rounded @ values)
        self.m, self.l, self.O = self.met[..., -1:], self.sums[-1], self.products[-1]

    def gradients(
        self, dO: Tensor, dl: Tensor, dm: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns three gradients: of the scores with all maxima constant [B, H, rows,
        keys], of V [B, H, keys, features], and of each tile's maximum [B, H, rows,
        tiles]. `dO`, `dl` and `dm` are the gradients of O, l and m after the last tile;
        `dm` is None where nothing else depends on m."""
        dV: list[Tensor] = []
        by_key: list[Tensor] = []  # of P, through O
        by_tile: list[Tensor] = []  # of a, through O
        sums: list[Tensor] = []  # of l
        for t, a in reversed([*enumerate(self._each(self.a))]):
            dV.append(self.cast[t].mT @ dO)
            by_key.append(dO @ self.V[t].mT)
            by_tile.append((dO * self.products[t]).sum(dim=-1, keepdim=True))
            sums.append(dl)
            dO, dl = dO * a, dl * a
        dl_met = torch.cat(sums[::-1], dim=-1)
        da = dl_met * torch.cat(self.sums[:-1], dim=-1) + torch.cat(by_tile[::-1], dim=-1)
        # The product's gradient comes back through the cast
        dP = torch.cat(by_key[::-1], dim=-1).to(self.dtype).float()
        dS = (self._by_key(dl_met) + dP) * self.P
        dm_of_tiles = self._gradients_of_maxima(dS, da * self.a, dm)
        return dS, torch.cat(dV[::-1], dim=2), dm_of_tiles

    def through_maxima(self, dm: Tensor, function: str) -> Tensor:
        """Returns what the gradients `dm` of the tiles' maxima [B, H, rows, tiles] add to
        the gradient of the scores, [B, H, rows, keys]. `function`: `max` gives all to one
        of equal scores in a tile, the one that `torch.max` took; any other name shares it
        equally among them, as `torch.amax` does."""
        if function == "max":
            starts = torch.arange(0, self.keys, self.tile, device=dm.device)
            return torch.zeros_like(self.P).scatter_(-1, self.place + starts, dm)
        is_largest = self._by_key(self.largest) == self.S
        counts = self._by_tile(is_largest, value=0.0).sum(dim=-1)
        return self._by_key(dm / counts) * is_largest

    def _gradients_of_maxima(self, dS: Tensor, da: Tensor, dm: Tensor | None) -> Tensor:
        """Returns the gradient of each tile's maximum, [B, H, rows, tiles]. `dS` is the
        gradient of the scores with maxima constant; `da`, [B, H, rows, tiles], that of
        m_{t-1} - m_t; `dm` that of m after the last tile, or None. What comes to a
        running maximum is added up in autograd's order."""
        before = self.met[..., :-1]
        # Two equal maxima have a half each
        share = torch.where(before == self.largest, 0.5, 1.0)
        parts = (da, share, before < self.largest)
        tiles = zip(self._tiles(-dS), *map(self._each, parts), strict=True)
        running = []
        for dP, of_a, half, is_below in reversed([*tiles]):
            through_P = dP.sum(dim=-1, keepdim=True)
            dm = (through_P if dm is None else dm + through_P) - of_a
            running.append(dm)
            dm = of_a + (dm * half).masked_fill_(is_below, 0.0)
        every = torch.cat(running[::-1], dim=-1) * share
        return every.masked_fill_(before > self.largest, 0.0)

    def _by_tile(self, x: Tensor, value: float) -> Tensor:
        """Returns numbers of keys [B, H, rows, keys] as [B, H, rows, tiles, tile]; the
        last tile is filled up with `value`."""
        padded = torch.nn.functional.pad(x, (0, -self.keys % self.tile), value=value)
        tiles: Tensor = padded.unflatten(-1, (-1, self.tile))
        return tiles

    def _by_key(self, x: Tensor) -> Tensor:
        """Returns numbers of tiles [B, H, rows, tiles] for each key, [B, H, rows,
        keys]."""
        return x.repeat_interleave(self.tile, dim=-1)[..., : self.keys]

    def _each(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns numbers of tiles [B, H, rows, tiles], one by one."""
        tiles: tuple[Tensor, ...] = x.split(1, dim=-1)
        return tiles

    def _tiles(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns numbers of keys [B, H, rows, keys], tile by tile."""
        tiles: tuple[Tensor, ...] = x.split(self.tile, dim=-1)
        return tiles
