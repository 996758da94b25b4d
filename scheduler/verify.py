"""Check a scheduler while it runs: a device that remembers what every slot holds, and the invariants of the books.

In the place of keys and values a slot holds the hash of the whole token prefix up to its position, which is what real
keys and values depend on. A step writes its slots first and then reads all earlier positions of its requests, as each
layer does on a device; a slot that holds anything else than the reader's own prefix is an error at once.
"""

import zlib
from collections import Counter, deque
from collections.abc import Iterable

from scheduler.block_pool import NULL_BLOCK
from scheduler.buckets import BucketPolicy
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.outputs import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler, make_scheduler

VOCAB_SIZE = 31
EOS_TOKEN_ID = 2


def sample(prefix: int) -> int:
    """The next token after a prefix: a fixed function, so that a request's outputs depend on its own tokens alone."""
    return (prefix >> 7) % VOCAB_SIZE


def root_prefix(request: Request) -> int:
    """What the prefix hashes of a request start from."""
    return 0 if request.cache_salt is None else zlib.crc32(request.cache_salt.encode())


def expected_outputs(request: Request) -> list[int]:
    """The outputs of a request that is not disturbed by anything."""
    prefix = root_prefix(request)
    for token_id in request.prompt_token_ids:
        prefix = hash((prefix, token_id))
    outputs: list[int] = []
    while request.num_prompt_tokens + len(outputs) < request.max_num_tokens:
        outputs.append(sample(prefix))
        if outputs[-1] in request.stop_tokens and len(outputs) >= request.sampling_params.min_tokens:
            break
        prefix = hash((prefix, outputs[-1]))
    return outputs


class _Prefix:
    """Tokens with the hash of the prefix that each one ends."""

    def __init__(self, root: int, token_ids: list[int]) -> None:
        self.token_ids: list[int] = []
        self.prefixes: list[int] = []
        self._last = root
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        self._last = hash((self._last, token_id))
        self.token_ids.append(token_id)
        self.prefixes.append(self._last)


class _Row(_Prefix):
    """What the device knows of one request: its tokens and its block table."""

    def __init__(self, root: int, token_ids: list[int], block_ids: list[int]) -> None:
        super().__init__(root, token_ids)
        self.block_ids = list(block_ids)


class PrefixDevice:
    """Runs steps at once, in the order of the calls, on slots that hold prefix hashes."""

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.blocks: list[list[int | None]] = [[None] * config.block_size for _ in range(config.num_blocks)]
        self.rows: dict[str, _Row] = {}

    def run(self, output: SchedulerOutput, requests: dict[str, Request]) -> ModelRunnerOutput:
        """Write, read and sample one step. requests: by id, for the roots of their prefixes."""
        self._update_rows(output, requests)
        computed = self._num_computed_tokens(output)
        for request_id, num_new in output.num_scheduled_tokens.items():
            self._write(self.rows[request_id], computed[request_id], num_new)
        sampled = {}
        for request_id, num_new in output.num_scheduled_tokens.items():
            row = self.rows[request_id]
            num_tokens = computed[request_id] + num_new
            self._check_reads(request_id, row, num_tokens)
            if num_tokens == len(row.token_ids):
                sampled[request_id] = sample(row.prefixes[-1])
        for request_id, token_id in sampled.items():
            self.rows[request_id].append(token_id)
        return ModelRunnerOutput(sampled)

    def _update_rows(self, output: SchedulerOutput, requests: dict[str, Request]) -> None:
        for request_id in output.finished_request_ids:
            self.rows.pop(request_id, None)
        left = {i: self.rows.pop(i) for i in output.preempted_request_ids}
        assert not left.keys() & output.num_scheduled_tokens.keys(), "pre-empted and scheduled in one step"
        for new in output.scheduled_new_requests:
            assert new.request_id not in self.rows
            self.rows[new.request_id] = _Row(root_prefix(requests[new.request_id]), new.prompt_token_ids, new.block_ids)
        known = output.scheduled_cached_requests
        for request_id, block_ids in zip(known.request_ids, known.new_block_ids, strict=True):
            if request_id in known.resumed_request_ids:
                assert request_id not in self.rows and block_ids is not None
                self.rows[request_id] = _Row(
                    root_prefix(requests[request_id]), known.all_token_ids[request_id], block_ids
                )
            elif block_ids is not None:
                self.rows[request_id].block_ids += block_ids

    def _num_computed_tokens(self, output: SchedulerOutput) -> dict[str, int]:
        known = output.scheduled_cached_requests
        computed = dict(zip(known.request_ids, known.num_computed_tokens, strict=True))
        computed |= {new.request_id: new.num_computed_tokens for new in output.scheduled_new_requests}
        assert computed.keys() == output.num_scheduled_tokens.keys()
        return computed

    def _write(self, row: _Row, start: int, num_new: int) -> None:
        assert num_new >= 1 and start + num_new <= len(row.token_ids)
        for position in range(start, start + num_new):
            block = row.block_ids[position // self.block_size]
            assert block != NULL_BLOCK
            self.blocks[block][position % self.block_size] = row.prefixes[position]

    def _check_reads(self, request_id: str, row: _Row, num_tokens: int) -> None:
        for index, start in enumerate(range(0, num_tokens, self.block_size)):
            end = min(start + self.block_size, num_tokens)
            block = row.block_ids[index]
            assert self.blocks[block][: end - start] == row.prefixes[start:end], (
                f"request {request_id} reads positions {start}..{end - 1} in block {block}, which holds something else"
            )


def check_books(scheduler: Scheduler) -> None:
    """Assert that queues, references, free list and prefix cache agree with each other."""
    running, waiting = list(scheduler.running), [*scheduler.waiting, *scheduler.skipped]
    assert len(running) <= scheduler.config.max_num_seqs
    assert Counter(r.request_id for r in running + waiting) == Counter(scheduler.requests.keys())
    assert all(r.status is RequestStatus.RUNNING for r in running)
    assert all(not r.block_ids and r.num_computed_tokens == 0 for r in waiting)
    pool, block_size = scheduler.kv.pool, scheduler.kv.block_size
    for request in running:
        assert request.num_computed_tokens <= request.num_tokens + request.num_output_placeholders
        assert request.num_computed_tokens <= len(request.block_ids) * block_size
        assert len(set(request.block_ids)) == len(request.block_ids)
    held = Counter(block for request in running for block in request.block_ids)
    held[NULL_BLOCK] += 1
    assert [held[block] for block in range(pool.num_blocks)] == pool.ref_counts
    free = pool.free_block_ids()
    assert len(free) == len(set(free)) == pool.num_free_blocks
    assert set(free) == {block for block, count in enumerate(pool.ref_counts) if count == 0}
    known = {block: block_hash for block_hash, blocks in pool.known_blocks() for block in blocks}
    assert known == {block: h for block, h in enumerate(pool.block_hashes) if h is not None}


class CheckedScheduler:
    """A scheduler with its PrefixDevice; every call checks the books, the slots and what the caller is told.

    Raises: AssertionError where the scheduler is wrong.
    """

    def __init__(
        self, config: SchedulerConfig, cache_config: CacheConfig, bucket_policy: BucketPolicy | None = None
    ) -> None:
        self.scheduler = make_scheduler(config, cache_config, bucket_policy)
        self.device = PrefixDevice(cache_config)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.max_in_flight = 2 if config.async_scheduling else 1
        self.received: dict[str, list[int]] = {}  # unfinished requests -> tokens told to the caller
        self.ended: dict[str, tuple[list[int], str]] = {}  # the others -> their tokens and finish reason
        self.num_schedules = 0
        self._requests: dict[str, Request] = {}  # those whose end the caller has not been told
        self._tokens: dict[str, _Prefix] = {}  # by request id: the tokens in its hashed blocks
        self._claims: dict[bytes, list[int]] = {}  # block hash -> what the block must hold

    def add(self, request: Request) -> None:
        """Add a request."""
        self.scheduler.add_request(request)
        self._requests[request.request_id] = request
        self.received[request.request_id] = []
        self._tokens[request.request_id] = _Prefix(root_prefix(request), [])
        self.check()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests, known or not."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self.check()

    def schedule(self) -> SchedulerOutput:
        """Schedule a step and run it; its tokens stay in flight until update()."""
        assert len(self.in_flight) < self.max_in_flight
        output = self.scheduler.schedule()
        self.num_schedules += 1
        total = sum(output.num_scheduled_tokens.values())
        assert total == output.total_num_scheduled_tokens <= self.scheduler.config.max_num_batched_tokens
        self.in_flight.append((output, self.device.run(output, self._requests)))
        self.check()
        return output

    def update(self) -> EngineCoreOutputs:
        """Hand the oldest step in flight to the scheduler."""
        outputs = self.scheduler.update_from_output(*self.in_flight.popleft())
        assert len(set(outputs.request_ids)) == len(outputs.request_ids)
        for request_id, token_id in zip(outputs.request_ids, outputs.new_token_ids, strict=True):
            self.received[request_id].append(token_id)
        self.check()
        for request_id, end in outputs.finished.items():
            self._check_end(request_id, end.finish_reason)
        return outputs

    def step(self) -> list[EngineCoreOutputs]:
        """One turn of an engine's loop: schedule, and take in the oldest step; all of them if nothing was scheduled."""
        outputs = [self.update()] if self._is_full() else []
        output = self.schedule()
        while self.in_flight and (self._is_full() or not output.num_scheduled_tokens):
            outputs.append(self.update())
        return outputs

    def drain(self, max_steps: int = 10_000) -> None:
        """Run until nothing is left to do; then every block must be free."""
        for _ in range(max_steps):
            if not (self.scheduler.has_requests() or self.in_flight):
                break
            self.step()
        assert not self.received and not self.device.rows, f"not ended: {sorted(self.received)}"
        pool = self.scheduler.kv.pool
        assert pool.num_free_blocks == pool.num_usable_blocks

    def _is_full(self) -> bool:
        return len(self.in_flight) >= self.max_in_flight

    def check(self) -> None:
        """Check the books, and that every block known by a hash holds what the hash claims."""
        check_books(self.scheduler)
        for request in self._requests.values():
            self._note_claims(request)
        known = [(block, h) for block, h in enumerate(self.scheduler.kv.pool.block_hashes) if h is not None]
        for block, block_hash in known:
            assert self.device.blocks[block] == self._claims[block_hash], f"block {block} lacks what its hash claims"
        if len(self._claims) > 1000:  # bound the memory of a long run
            live = {h for _, h in known}.union(*(request.block_hashes for request in self._requests.values()))
            self._claims = {h: self._claims[h] for h in live}

    def _note_claims(self, request: Request) -> None:
        """Work out from the request's own tokens what each of its hashed blocks must hold."""
        tokens = self._tokens[request.request_id]
        block_size = self.scheduler.kv.block_size
        for index in range(len(tokens.prefixes) // block_size, len(request.block_hashes)):
            start, end = index * block_size, (index + 1) * block_size
            for token_id in request.token_ids[start:end]:
                tokens.append(token_id)
            self._claims[request.block_hashes[index]] = tokens.prefixes[start:end]

    def _check_end(self, request_id: str, finish_reason: str) -> None:
        tokens, request = self.received.pop(request_id), self._requests.pop(request_id)
        self.ended[request_id] = tokens, finish_reason
        del self._tokens[request_id]
        expected = expected_outputs(request)
        if finish_reason == "abort":
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
            assert finish_reason == ("stop" if tokens[-1] in request.stop_tokens else "length")
