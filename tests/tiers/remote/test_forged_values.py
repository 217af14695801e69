"""Values forged by a writer without the secret: no forged block is read, and no token of a reply changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata.engine.engine import Engine
from kvstrata.prefix_cache.keys import chain
from kvstrata.tiers.block import Block, BlockTensor
from kvstrata.tiers.block_file import decode_block
from kvstrata.tiers.read_pool import MissingBlock
from kvstrata.tiers.remote.open_store import make_store
from kvstrata.tiers.remote.sealing import PLAIN, Keys, is_name, keys_of, seal, unseal
from kvstrata.tiers.remote.store import PREFIX, KeyValueStore
from kvstrata.tiers.remote.url import parse_url
from tests.support.models import VOCAB, tiny_loaded
from tests.tiers.disk.blocks import all_same, content_of
from tests.tiers.remote.chains import put_chain, random_ids, read_all
from tests.tiers.remote.stores import SECRET, Valkey, open_remote, private_folder, secret_file
from tests.tiers.remote.test_engine import counters, engine_on, generate, write_to_store

NUM_ATTACKS = 1000
PROMPT = tuple(i * 7 % VOCAB for i in range(530))


class Attacker:
    """A writer without the secret, who has read every value of this store and of another one."""

    def __init__(self, own: Sequence[bytes], strange: Sequence[bytes], bodies: Sequence[bytes]) -> None:
        """Know values of this store (`own`) and of another (`strange`). `bodies`: blocks before they were sealed, as an
        attacker who guessed the tokens could make them."""
        self._chance = random.Random(6)
        self._own = own
        self._strange = strange
        self._bodies = bodies

    def pick(self, names: Sequence[str]) -> str:
        return self._chance.choice(names)

    def forge(self, name: str, whole: bytes) -> bytes:
        """Return a value that differs from `whole`, the value under this name."""
        chance = self._chance
        match chance.randrange(8):
            case 0:
                at = chance.randrange(len(whole))
                return whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :]
            case 1:
                return whole[: chance.randrange(len(whole))]
            case 2:
                # A value of another name: swapped or replayed.
                return chance.choice([each for each in self._own if each != whole])
            case 3:
                return chance.choice(self._strange)
            case 4:
                return whole[:24] + bytes(len(whole) - 24)
            case 5:
                return whole + chance.randbytes(chance.randrange(1, 64))
            case 6:
                return PLAIN + chance.randbytes(len(whole))
            case _:
                # The plain format of a store without a secret, with a correct checksum.
                return bytes(seal(Keys(b"", None), name, chance.choice(self._bodies)))


def put_back(store: KeyValueStore, name: str, content: bytes) -> None:
    store.delete([name])
    assert store.create(name, content, 3600.0)


def contents_of(store: KeyValueStore) -> dict[str, bytes]:
    names = sorted(value.name for value in store.values() if is_name(value.name))
    return {name: bytes(store.get(name, 1 << 30) or b"") for name in names}


@pytest.mark.parametrize("kind", ["valkey", "folder"])
def test_read_forged_values_is_always_a_miss(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    url = request.getfixturevalue("redis_url") if kind == "valkey" else private_folder(tmp_path)
    tier = open_remote(url, secret_file(tmp_path))
    foreign_folder = tmp_path / "foreign"
    foreign_folder.mkdir(mode=0o700)
    foreign = open_remote(f"file://{foreign_folder}", secret_file(tmp_path, b"x" * 40, "other"))
    ids, other_ids = random_ids(4, 4 * 256), random_ids(5, 4 * 256)
    blocks = [*put_chain(tier, ids, (512,)), *put_chain(tier, other_ids, (512,))]
    put_chain(foreign, ids)
    whole, store = contents_of(tier.block_store.store), tier.block_store.store
    bodies = [content_of(block) for block in blocks]
    attacker = Attacker(list(whole.values()), list(contents_of(foreign.block_store.store).values()), bodies)
    by_name = {tier.block_store.names.name_of(block.id): block for block in blocks}
    for _ in range(NUM_ATTACKS):
        name = attacker.pick(list(whole))
        forged = attacker.forge(name, whole[name])
        assert forged != whole[name]
        put_back(store, name, forged)
        (came,) = read_all(tier, [by_name[name].id])
        assert isinstance(came, MissingBlock), "a wrong block was taken for a right one"
        tier.flush(5.0)
        put_back(store, name, whole[name])

    assert sum(tier.usage().counters["missed"].values()) == NUM_ATTACKS
    came = read_all(tier, [block.id for block in blocks])
    assert all_same(came, blocks)
    for each in (tier, foreign):
        each.close()


class Victim:
    """An engine with a conversation in a store. `expected`: by name, the reply while that value is missing."""

    def __init__(self, engine: Engine, server: Valkey) -> None:
        self._engine = engine
        self._client = server.client
        self._number = 0
        generate(engine, "first", PROMPT, 4)
        write_to_store(engine)
        store = make_store(parse_url(server.url))
        self.whole = contents_of(store)
        store.close()
        self.expected = {name: self.reply_without(name) for name in self.whole}

    def reply_without(self, name: str) -> list[int]:
        self._client.delete(f"{PREFIX}:{name}")
        ids = self.reply()
        self.restore(name)
        return ids

    def reply_with(self, name: str, content: bytes) -> list[int]:
        self._put(name, content)
        ids = self.reply()
        self.restore(name)
        return ids

    def reply(self) -> list[int]:
        """Return the token ids of a reply. The prompt is loaded from the store, because memory is cleared first."""
        self._engine.ask(lambda core: core.prefix_cache.evictor.clear(tier="hot")).result(60)
        self._number += 1
        return generate(self._engine, f"again {self._number}", PROMPT, 6).ids

    def restore(self, name: str) -> None:
        def forget(core) -> None:
            tier = core.prefix_cache.shared.tier
            assert tier.flush(10.0).is_empty
            tier.block_store.avoided.discard(name)

        self._engine.ask(forget).result(60)
        self._put(name, self.whole[name])

    def _put(self, name: str, content: bytes) -> None:
        """Set a value at once: the engine writes missing values whenever it is idle."""
        self._client.set(f"{PREFIX}:{name}", content)


@pytest.mark.parametrize(
    ("architecture", "num_attacks"),
    [
        ("llama", 30),
        ("qwen3_next", 20),
        pytest.param("llama", 200, marks=pytest.mark.slow),
        pytest.param("qwen3_next", 150, marks=pytest.mark.slow),
    ],
)
def test_engine_forged_values_change_no_token(
    architecture: str, num_attacks: int, server: Valkey, tmp_path: Path
) -> None:
    """Expect the reply that is given while the value is missing. A wrong block with a valid seal does change the reply,
    which proves that this test would notice a forged one."""
    pytest.importorskip("cryptography")
    keys = keys_of(SECRET)
    with engine_on(server.url, tiny_loaded(architecture), secret_file(tmp_path)) as engine:
        victim = Victim(engine, server)
        whole = victim.whole
        bodies = {name: bytes(unseal(keys, name, content)) for name, content in whole.items()}
        strange = [bytes(seal(keys_of(b"x" * 40), name, body)) for name, body in bodies.items()]
        attacker = Attacker(list(whole.values()), strange, list(bodies.values()))
        num_wrong, seen = 0, counters(engine).get("remote_missed_seal", 0)
        for number in range(num_attacks):
            name = attacker.pick(list(whole))
            num_wrong += victim.reply_with(name, attacker.forge(name, whole[name])) != victim.expected[name]
            assert counters(engine)["remote_missed_seal"] > seen + number, "it was not even read"
        assert num_wrong == 0
        made_wrong = [
            victim.reply_with(name, with_wrong_kv(name, bodies[name])) != victim.expected[name] for name in whole
        ]

    assert any(made_wrong)


def with_wrong_kv(name: str, body: bytes) -> bytes:
    """Return a value with a valid seal and wrong KV, made with the secret."""
    block = decode_block(memoryview(body), None, root=None, chain=chain)
    return bytes(seal(keys_of(SECRET), name, content_of(_with_other_bytes(block))))


def _with_other_bytes(block: Block) -> Block:
    tensors = {name: BlockTensor(t.dtype, t.shape, bytes(t.view())[::-1]) for name, t in block.tensors.items()}
    return replace(block, tensors=tensors)
