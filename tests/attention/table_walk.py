"""What the kernel of a decode step does, in a few lines: it reads what its tables say, by numbers that stand for
addresses. For machines without a GPU."""

from __future__ import annotations

from typing import Any
from weakref import ref

import mlx.core as mx
import numpy as np

from kvstrata.attention.cuda import step as cuda_step
from kvstrata.attention.cuda.ranges import Range
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.cuda import addresses as cuda_addresses
from kvstrata.codecs.cuda.kernels import ADDRESSES, WARPS
from kvstrata.codecs.cuda.planes import RAW_BITS, bits_of
from kvstrata.codecs.mean_runs import GROUP_TOKENS, ids


class Walk:
    def __init__(self) -> None:
        self._parts: list[tuple[ref[Any], ref[Any]]] = []  # K and V, which it does not keep
        self.launches: list[cuda_step.StepLaunch] = []

    def install(self, monkeypatch: object) -> None:
        patch = monkeypatch.setattr  # pyright: ignore[reportAttributeAccessIssue]
        patch(cuda_step, "addresses_of", lambda part: part.where.get(lambda: self._number(part)))
        patch(cuda_addresses, "collect", lambda rows, _: mx.stack(rows))
        patch(cuda_step, "attend_step", self.attend_step)

    def _number(self, part: Range) -> mx.array:
        self._parts.append((ref(part.k), ref(part.v)))
        return mx.array(np.full(ADDRESSES, len(self._parts) - 1, np.uint64))

    def attend_step(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        launch: cuda_step.StepLaunch,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        self.launches.append(launch)
        assert launch.counters.size == k.shape[0] * k.shape[1]
        places, kinds, addresses = (np.asarray(x) for x in (launch.places, launch.kinds, launch.addresses))
        assert len(places) == k.shape[0]
        out = []
        for row, (own, at, num_tokens, size, first, count, _, _) in enumerate(places.tolist()):
            own_k, own_v = self._at(addresses[own])
            assert kinds[own, :3].tolist() == [RAW_BITS, RAW_BITS, own_k.shape[2]]
            own_k[:, :, at] = k[row : row + 1, :, 0]
            own_v[:, :, at] = v[row : row + 1, :, 0]
            seen = [self._read(piece, kinds, addresses, k.dtype) for piece in np.asarray(launch.pieces)[first:][:count]]
            starts = range(0, num_tokens, size)
            seen += [[x[:, :, a : min(a + size, num_tokens)] for x in (own_k, own_v)] for a in starts]
            assert len(seen) <= launch.num_blocks * WARPS
            all_k, all_v = (mx.concatenate([pair[i] for pair in seen], axis=2) for i in (0, 1))
            out.append(mx.fast.scaled_dot_product_attention(q[row : row + 1], all_k, all_v, scale=scale, sinks=sinks))
        return mx.concatenate(out)

    def _at(self, address: np.ndarray) -> tuple[Any, Any]:
        k, v = (held() for held in self._parts[address[0]])
        assert k is not None, "read after it was freed"
        assert v is not None, "read after it was freed"
        return k, v

    def _read(self, piece: np.ndarray, kinds: np.ndarray, addresses: np.ndarray, dtype: mx.Dtype) -> list[mx.array]:
        number, start, count, k_segment, v_segment, offset, _, _ = piece.tolist()
        (k, v), kind, end = self._at(addresses[number]), kinds[number].tolist(), start + count
        assert 0 <= start < end <= kind[2]
        if not isinstance(k, EncodedArray):
            assert kind[:3] == [RAW_BITS, RAW_BITS, k.shape[2]]
            return [x[:, :, start:end] for x in (k, v)]
        assert kind[:5] == [bits_of(k), bits_of(v), k.num_tokens, len(k.mean_runs), len(v.mean_runs)]
        assert offset == (k.position + start) % GROUP_TOKENS
        for planes, segment in ((k, k_segment), (v, v_segment)):
            assert not planes.mean_runs or (ids(planes.mean_runs)[start:end] == segment).all()
        return [x.codec.decode(x, dtype)[None, :, start:end] for x in (k, v)]
