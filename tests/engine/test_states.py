from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.engines import (
    CONFIG,
    LETTERS,
    MAX_LENGTH,
    Plain,
    greedy_params,
    outputs,
    prompt_of,
    running,
    wait_until,
)
from wkvm_jax.engine.engine import Engine
from wkvm_jax.errors import (
    NoFreeSlotError,
    RequestError,
    StateMismatchError,
    StatePinnedError,
    UnknownHandleError,
    UnknownRequestError,
)
from wkvm_jax.models.model import Model
from wkvm_jax.state import State

BASE = prompt_of(40)
FREE = {"max_tokens": 6, "ignore_eos": True}
LONG = {"max_tokens": 150, "ignore_eos": True}


def check(engine: Engine, plain: Plain, handle: str, tokens: list[int]) -> None:
    """A kept state has consumed all these tokens but the last, and its record says so."""
    record = engine.states.get(handle)
    assert (record.num_tokens, record.pending_token) == (len(tokens), tokens[-1])
    assert list(engine.states.token_ids(handle)) == tokens
    plain.assert_state(engine.states.load(handle), tokens[:-1])


def fill(engine: Engine) -> None:
    """Keeps as many states as an engine keeps: two slots are left to requests."""
    for _ in range(CONFIG.num_slots - 2):
        engine.states.create("fill", "x y z")
    assert engine.slots().free == 2


# Making and continuing ----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 9, 17, 21, 40])
def test_a_prompt_can_be_kept(engine: Engine, plain: Plain, length: int) -> None:
    record = engine.states.create("prompt", BASE[:length])
    assert str(record) == record.handle == "prompt@1" or record.version > 1
    assert record.operation == "prefill" and record.parents == () and record.tier == "device"
    assert not record.durable and record.fingerprint == engine.model.fingerprint
    check(engine, plain, record.handle, BASE[:length])


def test_a_record_counts_its_bytes(engine: Engine, model: Model) -> None:
    spec = model.state_spec
    record = engine.states.create("bytes", BASE[:10])
    assert record.bytes == spec.slot_bytes + spec.pages_for(9) * spec.page_bytes
    assert record.dtype == "float32"


@pytest.mark.parametrize("cut", [1, 2, 4, 5, 13, 24])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_continuing_equals_one_long_prompt(engine: Engine, plain: Plain, cut: int, more: int) -> None:
    parent = engine.states.create("start", BASE[:cut])
    request = engine.submit(BASE[cut : cut + more], state=parent.handle, save_as="end", **FREE)
    output = request.result(30)
    plain.assert_greedy(BASE[: cut + more], output.token_ids)
    assert (output.num_prompt_tokens, output.num_cached_tokens) == (more, cut - 1)
    assert output.handle is not None
    record = engine.states.get(output.handle)
    assert record.operation == "generate" and record.parents == (parent.handle,)
    check(engine, plain, output.handle, [*BASE[: cut + more], *output.token_ids])
    check(engine, plain, parent.handle, BASE[:cut])


def test_a_conversation_of_many_turns(engine: Engine, plain: Plain) -> None:
    tokens, state = [], None
    for turn in range(6):
        prompt = prompt_of(3 + 2 * turn, seed=turn)
        output = engine.submit(prompt, state=state, save_as="talk", **FREE).result(30)
        plain.assert_greedy([*tokens, *prompt], output.token_ids)
        tokens += [*prompt, *output.token_ids]
        state = output.handle
        assert state == f"talk@{engine.states.get('talk').version}"
        check(engine, plain, "talk", tokens)


def test_many_continue_one_state_at_once(engine: Engine, plain: Plain) -> None:
    parent = engine.states.create("crowd", BASE[:14])
    prompts = [prompt_of(1 + index % 5, index) for index in range(12)]
    requests = [engine.submit(prompt, state="crowd", **FREE) for prompt in prompts]
    for prompt, output in zip(prompts, outputs(requests), strict=True):
        plain.assert_greedy([*BASE[:14], *prompt], output.token_ids)
    check(engine, plain, parent.handle, BASE[:14])


def test_a_prompt_read_on_top_of_a_state_can_be_kept(engine: Engine, plain: Plain) -> None:
    engine.states.create("one", BASE[:7])
    for more in (0, 1, 6):
        record = engine.states.create("two", BASE[7 : 7 + more], state="one")
        assert record.parents == ("one@1",) or record.parents[0].startswith("one@")
        check(engine, plain, record.handle, BASE[: 7 + more])


def test_choices_continue_a_state(engine: Engine, plain: Plain) -> None:
    engine.states.create("choices", BASE[:10])
    for prompt in ([], [5], BASE[10:19]):
        params = greedy_params(5, prompt_logprobs=True)
        requests = engine.submit_choices(prompt, 3, state="choices", params=params)
        for output in outputs(requests):
            plain.assert_greedy([*BASE[:10], *prompt], output.token_ids)
            assert output.prompt_logprobs is not None
            assert [one.token_id for one in output.prompt_logprobs] == prompt
            tokens = [*BASE[:10], *prompt]
            expected = plain.log_probs(tokens, 10)[np.arange(len(prompt)), prompt] if prompt else []
            assert [one.logprob for one in output.prompt_logprobs] == pytest.approx(list(expected), abs=1e-3)


def test_an_empty_prompt_needs_a_pending_token(engine: Engine) -> None:
    with pytest.raises(RequestError) as caught:
        engine.submit("")
    assert caught.value.param == "prompt"


# Stopping -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 6, 21])
@pytest.mark.parametrize("at", [0, 1, 6])
def test_a_state_kept_after_a_stop_string_is_exactly_before_its_last_token(
    engine: Engine, plain: Plain, length: int, at: int
) -> None:
    params = {"max_tokens": 40, "ignore_eos": True, "logit_bias": LETTERS}
    free = engine.generate([BASE[:length]], **params)[0].token_ids
    wanted = bytes(free[at : at + 2]).decode()
    first = bytes(free).decode().index(wanted) + 2
    company = [engine.submit(BASE[:3], **LONG) for _ in range(2)]
    output = engine.submit(BASE[:length], save_as="stopped", stop=wanted, **params).result(30)
    assert output.finish_reason == "stop" and output.token_ids == free[:first] and output.handle is not None
    check(engine, plain, output.handle, [*BASE[:length], *output.token_ids])
    again = engine.submit([], state=output.handle, **params).result(30)
    assert again.token_ids == free[first:] + again.token_ids[len(free) - first :]
    for request in company:
        request.cancel()


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_state_kept_after_an_end_on_the_device(engine: Engine, plain: Plain, reason: str) -> None:
    free = engine.generate([BASE[:9]], max_tokens=12, ignore_eos=True)[0].token_ids
    stops = [free[5]] if reason == "stop" else []
    output = engine.submit(
        BASE[:9], save_as="ended", max_tokens=12, stop_token_ids=stops, ignore_eos=True
    ).result(30)
    assert output.finish_reason == reason and output.handle is not None
    assert output.token_ids == (free[: free.index(free[5]) + 1] if reason == "stop" else free)
    check(engine, plain, output.handle, [*BASE[:9], *output.token_ids])


def test_a_cancelled_request_keeps_nothing(engine: Engine) -> None:
    request = engine.submit("cancelled", save_as="never", stop="\0never", **LONG)
    wait_until(lambda: request.num_tokens > 2)
    request.cancel()
    output = request.result(30)
    assert output.finish_reason == "cancelled" and output.handle is None and output.token_ids
    with pytest.raises(UnknownHandleError):
        engine.states.get("never")


def test_two_may_be_kept_under_one_name(engine: Engine) -> None:
    results = outputs([engine.submit("twice", save_as="twice", **FREE) for _ in range(3)])
    assert len({output.handle for output in results}) == 3
    assert {str(record) for record in engine.states.list(name="twice")} == {
        output.handle for output in results
    }


# Forks --------------------------------------------------------------------------------------------


def test_a_fork_takes_no_slot(engine: Engine, plain: Plain) -> None:
    parent = engine.states.create("parent", BASE[:10])
    free = engine.slots().free
    children = engine.states.fork("parent", "child", n=20)
    assert isinstance(children, list) and len({str(child) for child in children}) == 20
    assert engine.slots().free == free
    one = engine.states.fork(str(children[-1]), "grandchild")
    assert str(one).startswith("grandchild@") and one.parents == (str(children[-1]),)
    assert one.operation == "fork"
    engine.states.delete(parent.handle)
    output = engine.submit(BASE[10:13], state="grandchild", **FREE).result(30)
    plain.assert_greedy(BASE[:13], output.token_ids)
    for child in children:
        check(engine, plain, child.handle, BASE[:10])


def test_children_go_their_own_ways(engine: Engine, plain: Plain) -> None:
    engine.states.create("parent", BASE[:10])
    engine.states.fork("parent", "child", n=3)
    requests = [
        engine.submit(prompt_of(4, seed), state=f"child@{record.version}", save_as="child", **FREE)
        for seed, record in enumerate(engine.states.list(name="child"))
    ]
    for seed, output in enumerate(outputs(requests)):
        plain.assert_greedy([*BASE[:10], *prompt_of(4, seed)], output.token_ids)
        assert output.handle is not None
        check(engine, plain, output.handle, [*BASE[:10], *prompt_of(4, seed), *output.token_ids])


@pytest.mark.parametrize("n", [0, -3, True])
def test_a_number_of_forks_that_cannot_be(engine: Engine, n: int) -> None:
    engine.states.create("parent", "x")
    with pytest.raises(RequestError) as caught:
        engine.states.fork("parent", "child", n=n)
    assert caught.value.param == "n" and len(engine.states.list()) == 1


# Snapshots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"save_as": "end", "stop": "\0never"}], ids=["plain", "alternating"])
def test_a_snapshot_leaves_its_request_alone(engine: Engine, plain: Plain, fields: dict[str, str]) -> None:
    (alone,) = engine.generate([BASE[:9]], **LONG)
    request = engine.submit(BASE[:9], **fields, **LONG)
    records = []
    for wanted in (1, 20, 21, 60):
        wait_until(lambda wanted=wanted: request.num_tokens >= wanted)
        records += [engine.states.snapshot(request, "photo") for _ in range(2)]
    output = request.result(30)
    plain.assert_greedy(BASE[:9], output.token_ids)
    assert output.token_ids == alone.token_ids
    tokens = [*BASE[:9], *output.token_ids]
    for record in records:
        assert record.operation == "snapshot"
        check(engine, plain, record.handle, tokens[: record.num_tokens])
        more = engine.submit([], state=record.handle, **FREE).result(30)
        plain.assert_greedy(tokens[: record.num_tokens], more.token_ids)
        check(engine, plain, record.handle, tokens[: record.num_tokens])


def test_a_snapshot_of_a_continued_conversation_knows_all_its_tokens(engine: Engine, plain: Plain) -> None:
    engine.states.create("before", BASE[:6])
    for n, prompt in ((1, BASE[6:9]), (3, BASE[6:9]), (1, []), (3, [])):
        params = greedy_params(150)
        requests = engine.submit_choices(prompt, n, state="before", params=params)
        wait_until(lambda request=requests[-1]: request.num_tokens > 3)
        record = engine.states.snapshot(requests[-1], "photo")
        tokens = [*BASE[:6], *prompt, *requests[-1].result(30).token_ids]
        assert record.parents == (str(engine.states.get("before")),)
        check(engine, plain, record.handle, tokens[: record.num_tokens])
        outputs(requests)


def test_only_what_generates_can_be_photographed(engine: Engine, plain: Plain) -> None:
    done = engine.submit("done", **FREE)
    done.result(30)
    with pytest.raises(UnknownRequestError):
        engine.states.snapshot(done, "late")
    prompt = prompt_of(200)
    with engine.lock:
        requests = [
            *engine.submit_choices(prompt, 2, params=greedy_params(9)),
            engine.submit(prompt, max_tokens=9, ignore_eos=True),
        ]
    refused = 0
    for turn in range(12):
        request = requests[turn % 3]
        try:
            record = engine.states.snapshot(request, "early")
        except UnknownRequestError:
            refused += 1
            continue
        tokens = [*prompt, *request.result(30).token_ids]
        assert record.num_tokens >= len(prompt)
        check(engine, plain, record.handle, tokens[: record.num_tokens])
    assert refused > 2, "some were asked for while their prompt was read"
    outputs(requests)


def test_what_waits_for_the_engine_cannot_be_called_from_a_listener(engine: Engine) -> None:
    """It runs on the engine's thread, while steps are in flight: the record would name another token."""
    request, errors = engine.submit("listen", **LONG), []

    def listen() -> None:
        if request.num_tokens == 20:
            try:
                engine.states.snapshot(request, "photo")
            except RuntimeError as error:
                errors.append(error)

    request.listen(listen)
    request.result(30)
    assert len(errors) == 1 and "listener" in str(errors[0])
    assert engine.states.list() == []


def test_a_snapshot_without_a_free_slot(engine: Engine, plain: Plain) -> None:
    fill(engine)
    request = engine.submit("full", **LONG)
    wait_until(lambda: request.num_tokens > 0)
    with pytest.raises(NoFreeSlotError, match="22 of this engine's 24 slots that states may keep"):
        engine.states.snapshot(request, "photo")
    plain.assert_greedy(list(b"full"), request.result(30).token_ids)


# Deleting, pinning, tags --------------------------------------------------------------------------


def test_deleting_does_not_disturb_who_continues(engine: Engine, plain: Plain) -> None:
    record = engine.states.create("gone", BASE[:20])
    with engine.lock:
        requests = [engine.submit(BASE[20:24], state="gone", **FREE) for _ in range(10)]
        engine.states.delete(record.handle)
        noise = [engine.submit(prompt_of(9, seed), **FREE) for seed in range(6)]
    for output in outputs(requests):
        plain.assert_greedy(BASE[:24], output.token_ids)
    outputs(noise)
    with pytest.raises(UnknownHandleError):
        engine.submit("x", state="gone")


def test_a_deleted_states_slot_is_free_again(engine: Engine) -> None:
    for _ in range(3 * CONFIG.num_slots):
        engine.states.delete(str(engine.states.create("again", "x y z")))
    assert engine.states.list() == [] and engine.slots().free == CONFIG.num_slots


def test_pinned_states_stay(engine: Engine) -> None:
    record = engine.states.create("pinned", "x")
    assert engine.states.pin("pinned").pinned
    with pytest.raises(StatePinnedError):
        engine.states.delete(record.handle)
    assert not engine.states.pin("pinned", False).pinned
    engine.states.delete("pinned")


def test_tags_select(engine: Engine) -> None:
    engine.states.create("one", "x")
    engine.states.create("two", "y")
    assert engine.states.tag("two", ["red", "blue"]).tags == ("red", "blue")
    assert [record.name for record in engine.states.list(tag="red")] == ["two"]
    assert [record.name for record in engine.states.list()] == ["one", "two"]


def test_lineage(engine: Engine) -> None:
    root = engine.states.create("root", "x y")
    child = engine.states.fork("root", "child")
    leaf = engine.submit("z", state="child", save_as="leaf", **FREE).result(30).handle
    records, edges = engine.states.lineage("leaf")
    assert {str(record) for record in records} == {str(root), str(child), leaf}
    assert set(edges) == {(str(root), str(child)), (str(child), leaf)}


@pytest.mark.parametrize("name", ["", "-a", "a b", "a@1", "a/b", "x" * 129])
def test_names_that_cannot_be(engine: Engine, name: str) -> None:
    for make in (
        lambda: engine.states.create(name, "x"),
        lambda: engine.submit("x", save_as=name),
        lambda: engine.states.put(name, engine.model.init_state(1, max_length=4)),
    ):
        with pytest.raises(RequestError):
            make()
    assert engine.states.list() == []


def test_the_argument_that_is_no_name_or_handle_is_named(engine: Engine) -> None:
    for param, call in (
        ("save_as", lambda: engine.submit("x", save_as="a b")),
        ("state", lambda: engine.submit("x", state="a b")),
        ("state", lambda: engine.submit("x", state="a@0")),
        ("name", lambda: engine.states.create("a b", "x")),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.param == param


# States of research code --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 9, 33])
def test_a_state_goes_in_and_out(engine: Engine, plain: Plain, length: int) -> None:
    _, state = plain.after(BASE[:length])
    record = engine.states.put("given", state)
    assert (record.operation, record.num_tokens, record.pending_token) == ("put", length, None)
    loaded = engine.states.load("given")
    plain.assert_state(loaded, BASE[:length])
    again = engine.states.put("again", loaded)
    for name, leaf in engine.states.load(again.handle).leaves.items():
        np.testing.assert_array_equal(leaf, loaded.leaves[name])
    output = engine.submit(BASE[length : length + 3], state="given", **FREE).result(30)
    plain.assert_greedy(BASE[: length + 3], output.token_ids)
    assert output.num_cached_tokens == length
    with pytest.raises(RequestError, match="empty"):
        engine.submit([], state="given")


def test_a_loaded_state_can_be_continued_by_the_model(engine: Engine, plain: Plain) -> None:
    engine.states.create("loaded", BASE[:10])
    state = engine.states.load("loaded", max_length=MAX_LENGTH)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, plain.fresh())
    logits, state = plain.model(jnp.array([BASE[9:10]]), state)
    np.testing.assert_allclose(logits[0, 0], plain.after(BASE[:10])[0], rtol=0, atol=1e-4)
    plain.assert_state(state, BASE[:10])


def test_fresh_states_can_be_put(engine: Engine, plain: Plain) -> None:
    engine.states.put("fresh", engine.model.init_state(1, max_length=8))
    assert engine.states.get("fresh").num_tokens == 0
    output = engine.submit(BASE[:5], state="fresh", **FREE).result(30)
    plain.assert_greedy(BASE[:5], output.token_ids)


def misfits(plain: Plain) -> dict[str, State]:
    """States that no engine of the model may take."""
    _, state = plain.after(BASE[:9])
    name, leaf = next(iter(state.leaves.items()))
    made = {
        "two rows": plain.model.init_state(2, max_length=8),
        "a leaf too few": state.replace(leaves={}),
        "a leaf too many": state.replace(leaves={**state.leaves, "more": leaf}),
        "another shape": state.replace(leaves={**state.leaves, name: leaf[..., :-1]}),
        "another dtype": state.replace(leaves={**state.leaves, name: leaf.astype(jnp.float16)}),
        "integers": state.replace(leaves={**state.leaves, name: leaf.astype(jnp.int32)}),
        "NaN": state.replace(leaves={**state.leaves, name: leaf.at[0, 0, 0, 0].set(jnp.nan)}),
        "infinity": state.replace(leaves={**state.leaves, name: leaf.at[0, 1, 0, 0].set(jnp.inf)}),
        "a negative count": state.replace(num_tokens=jnp.array([-1], jnp.int32)),
        "a count of another dtype": state.replace(num_tokens=jnp.array([9.0], jnp.float32)),
    }
    for pool_name, pool in state.pools.items():
        made |= {
            "no pages": state.replace(pools={pool_name: pool[:0]}),
            "too few pages": state.replace(pools={pool_name: pool[:2]}),
            "no pools": state.replace(pools={}),
            "pages of another shape": state.replace(pools={pool_name: pool[..., :-1]}),
            "NaN in a page": state.replace(pools={pool_name: pool.at[1].set(jnp.nan)}),
        }
    return made


def test_what_does_not_fit_is_refused(engine: Engine, plain: Plain) -> None:
    for what, state in misfits(plain).items():
        try:
            engine.states.put("misfit", state)
        except StateMismatchError:
            assert engine.slots().free == CONFIG.num_slots, what
        else:
            raise AssertionError(f"{what} was taken")
    assert engine.alive and engine.states.list() == []


def test_put_without_room(engine: Engine, plain: Plain) -> None:
    _, state = plain.after(BASE[:9])
    fill(engine)
    kept = len(engine.states.list())
    with pytest.raises(NoFreeSlotError):
        engine.states.put("more", state)
    assert len(engine.states.list()) == kept


def test_new_weights_refuse_old_states(model: Model) -> None:
    with running(model) as engine:
        old = engine.states.create("old", "x y z")
        engine.set_params(jax.tree.map(lambda leaf: leaf * 1.5, model.params))
        with pytest.raises(StateMismatchError, match=f"{old.fingerprint}.*{engine.model.fingerprint}"):
            engine.submit("more", state="old")
        assert str(engine.states.create("new", "x y z")) == "new@1"
        assert engine.submit("more", state="new", **FREE).result(30).finish_reason == "length"
        engine.set_params(model.params)
        assert engine.submit("more", state="old", **FREE).result(30).finish_reason == "length"


def test_kept_states_leave_slots_to_requests(engine: Engine) -> None:
    fill(engine)
    for keep in (
        lambda: engine.states.create("more", "w"),
        lambda: engine.submit("w", save_as="more", **FREE),
    ):
        with pytest.raises(NoFreeSlotError, match=r"22 kept states and 0 to come .* 24 slots .* delete some"):
            keep()
    assert engine.submit("room?", **FREE).result(30).finish_reason == "length"
    assert len(engine.states.fork("fill", "twins", n=30)) == 30


def test_a_request_that_kept_states_leave_no_room_for_ends_with_the_numbers(engine: Engine) -> None:
    fill(engine)
    choices = engine.submit_choices("room?", 2, params=greedy_params(2))
    for output in outputs(choices):
        assert output.finish_reason == "error" and output.error is not None
        assert "3 slots" in output.error and "delete some" in output.error
    engine.states.delete("fill")
    assert engine.submit("room?", **FREE).result(30).finish_reason == "length"
