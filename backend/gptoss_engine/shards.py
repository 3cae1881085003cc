"""What one rank holds of each tensor, where several share a model.

TP: query, key and value heads go to the ranks in order, and with them the rows of qkv and the
columns of out. EP: each rank has whole experts; without it TP cuts every expert, on the borders of
blocks of 128. The router, the norms, the embedding and the unembedding are on every rank.

The ranks' outputs of attention and of the experts are partial sums. A bias that is added after such
a sum (out's, and w2's where experts are cut) is rank 0's; the others have zeros.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

from gptoss_engine.checkpoints.layouts import tensor_shapes
from gptoss_engine.config import InvalidConfig
from gptoss_engine.model_config import ModelConfig
from gptoss_kernels.fp8 import BLOCK, num_blocks


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `tp` ranks. ep is tp, where each has whole experts, or 1, where all are cut."""

    index: int = 0
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.ep not in (1, self.tp):
            raise InvalidConfig(f"ep must be 1 or tp ({self.tp}), got {self.ep}")
        if not 0 <= self.index < self.tp:
            raise InvalidConfig(f"a rank must be in [0, {self.tp - 1}], got {self.index}")


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of one tensor, cut out of the whole.

    experts: those of w13, w2 and their biases, else None. rows: pieces that follow each other (of
    qkv: query, key and value heads). columns: of a matrix, else None. is_zero: it is another
    rank's to add, and zeros here.
    """

    experts: range | None
    rows: tuple[slice, ...]
    columns: slice | None = None
    is_zero: bool = False

    def shape(self, is_padded: bool) -> tuple[int, ...]:
        """Of the rank's tensor; padded: each piece of the rows filled up to whole blocks of 128."""
        experts = () if self.experts is None else (len(self.experts),)
        columns = () if self.columns is None else (size(self.columns),)
        return (*experts, self.starts(is_padded)[-1], *columns)

    def starts(self, is_padded: bool) -> list[int]:
        """Where each piece of the rows starts in the rank's tensor, and where the last one ends."""
        sizes = map(size, self.rows)
        return list(accumulate((_filled(n) if is_padded else n for n in sizes), initial=0))


def size(piece: slice) -> int:
    return piece.stop - piece.start


def _filled(count: int) -> int:
    return num_blocks(count) * BLOCK


def part(config: ModelConfig, name: str, rank: Rank) -> Part:
    """What the rank holds of the tensor, by the engine's name.

    Raises InvalidConfig, with the numbers, where heads, experts or blocks do not suffice.
    """
    field = name.split(".")[-1]
    if field in ("w13", "w13_bias", "w2", "w2_bias"):
        return _expert_part(config, field, rank)
    shape = tensor_shapes(config)[field]
    rows = (slice(0, shape[0]),)
    columns = slice(0, shape[1]) if len(shape) > 1 else None
    match field:
        case "qkv" | "qkv_bias":
            rows = _qkv_rows(config, rank)
        case "sinks":
            rows = (_share("num_heads", config.num_heads, rank),)
        case "out":
            columns = _scaled(_share("num_heads", config.num_heads, rank), config.head_dim)
    return Part(None, rows, columns, is_zero=field == "out_bias" and rank.index > 0)


def experts(config: ModelConfig, rank: Rank) -> range | None:
    """The rank's own, where each has whole ones; None where all are cut, or there is one rank."""
    return _expert_part(config, "w13", rank).experts if rank.ep > 1 else None


def of_rank(config: ModelConfig, rank: Rank) -> ModelConfig:
    """The figures of what the rank computes: its heads, and the width of its part of an expert.

    All experts are counted, as it routes over all.
    """
    inner = _expert_part(config, "w2", rank).columns
    assert inner is not None
    return replace(
        config,
        num_heads=size(_share("num_heads", config.num_heads, rank)),
        num_kv_heads=size(_share("num_kv_heads", config.num_kv_heads, rank)),
        intermediate_size=size(inner),
    )


def _expert_part(config: ModelConfig, field: str, rank: Rank) -> Part:
    experts, inner = range(config.num_experts), slice(0, config.intermediate_size)
    if rank.ep > 1:
        mine = _share("num_experts", config.num_experts, rank, "ep")
        experts = range(mine.start, mine.stop)
    else:
        inner = _blocks_share(config.intermediate_size, rank)
    hidden = slice(0, config.hidden_size)
    match field:
        case "w13":
            return Part(experts, (_scaled(inner, 2),), hidden)
        case "w13_bias":
            return Part(experts, (_scaled(inner, 2),))
        case "w2":
            return Part(experts, (hidden,), inner)
    return Part(experts, (hidden,), is_zero=rank.ep == 1 and rank.index > 0)


def _qkv_rows(config: ModelConfig, rank: Rank) -> tuple[slice, ...]:
    query = _scaled(_share("num_heads", config.num_heads, rank), config.head_dim)
    key = _scaled(_share("num_kv_heads", config.num_kv_heads, rank), config.head_dim)
    first_key = config.num_heads * config.head_dim
    first_value = first_key + config.num_kv_heads * config.head_dim
    if rank.tp == 1:
        return (slice(0, first_value + key.stop),)
    return (query, _moved(key, first_key), _moved(key, first_value))


def _share(name: str, count: int, rank: Rank, kind: str = "tp") -> slice:
    """The rank's share of `count` equal things."""
    if count % rank.tp:
        raise InvalidConfig(f"{kind} ({rank.tp}) must divide {name} ({count})")
    share = count // rank.tp
    return slice(rank.index * share, (rank.index + 1) * share)


def _blocks_share(size: int, rank: Rank) -> slice:
    """Whole blocks of 128, the first ranks one more where they do not divide; the short one last.

    2880 is 1536 + 1344, 3 x 768 + 576, 7 x 384 + 192 for 2, 4 and 8 ranks.
    """
    blocks = num_blocks(size)
    if blocks < rank.tp:
        raise InvalidConfig(
            f"tp must be at most {blocks} where experts are cut, got {rank.tp}: "
            f"intermediate_size ({size}) has {blocks} blocks of {BLOCK}; with ep {rank.tp} each "
            "rank has whole ones"
        )
    each, more = divmod(blocks, rank.tp)
    first = rank.index * each + min(rank.index, more)
    last = first + each + (rank.index < more)
    return slice(first * BLOCK, min(last * BLOCK, size))


def _scaled(piece: slice, factor: int) -> slice:
    return slice(piece.start * factor, piece.stop * factor)


def _moved(piece: slice, offset: int) -> slice:
    return slice(piece.start + offset, piece.stop + offset)


def covering(piece: slice, whole: int) -> slice:
    """The blocks of 128, of `whole` rows or columns, that hold the piece."""
    return slice(piece.start // BLOCK * BLOCK, min(_filled(piece.stop), whole))


def check_blocks(name: str, piece: slice, whole: int) -> None:
    """Raises InvalidConfig where a piece's own blocks of 128 would lie in two of the whole's."""
    if piece.start % BLOCK and piece.start // BLOCK != (piece.stop - 1) // BLOCK:
        raise InvalidConfig(
            f"{name} cannot be cut at {piece.start}:{piece.stop} of {whole} in FP8: a part must "
            f"start on the border of a block of {BLOCK}, or lie within one"
        )
