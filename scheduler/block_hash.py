"""What a full block is called in the prefix cache: a digest of every token up to its end, and of the cache salt.

Two blocks have one hash only if their keys and values are equal, so a hit never needs to compare tokens: the digest is
SHA-256, 32 bytes, and covers (parent digest, token ids); the chain starts from a digest of what else the values
depend on, each part tagged with its name, so that a salt never equals another field of the same text.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256

DIGEST_BYTES = 32


def root_digest(cache_salt: str | None) -> bytes:
    """The parent of a request's first block; a new field that values depend on gets a tag of its own here."""
    salt = b"" if cache_salt is None else b"cache_salt=" + cache_salt.encode()
    return sha256(b"prefix root\0" + salt).digest()


def extend_block_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, root: bytes) -> None:
    """Append the digests of the full blocks of token_ids that `hashes` lacks.

    Args:
      hashes: digests of the leading full blocks; MUTATED.
      token_ids: all tokens of the request, fastest as array("i"); a partial last block is left out.
      block_size: tokens a block.
      root: parent of the first block.
    """
    begin = len(hashes) * block_size
    end = len(token_ids) // block_size * block_size
    if begin >= end:
        return
    data = array("i", token_ids[begin:end]).tobytes()
    stride = len(data) * block_size // (end - begin)
    parent = hashes[-1] if hashes else root
    for offset in range(0, len(data), stride):
        parent = sha256(parent + data[offset : offset + stride]).digest()
        hashes.append(parent)
