"""`/v1/states` in front of the real engine, with a small hybrid model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.families.toy import toy_model
from tests.serving.live import LiveServer, error_of, serving, wait_until
from wkvm_jax.config import EngineConfig
from wkvm_jax.engine.engine import Engine
from wkvm_jax.serving import states
from wkvm_jax.store.memory import MemoryRecords


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveServer]:
    config = EngineConfig(num_slots=8, max_rows=4, tokens_per_slot=512, prefill_chunks=(16,))
    with serving(Engine(toy_model(), config, MemoryRecords())) as server:
        yield server


@pytest.fixture
def server(shared: LiveServer) -> Iterator[LiveServer]:
    """A server without states; afterwards every slot is free again."""
    total = free_slots(shared)
    yield shared
    while page := shared.client.get("/v1/states").json()["data"]:
        for state in page:
            shared.client.patch(f"/v1/states/{state['handle']}", json={"pinned": False})
            assert shared.client.delete(f"/v1/states/{state['handle']}").status_code == 204
    wait_until(lambda: free_slots(shared) == total)


def free_slots(server: LiveServer) -> int:
    free: int = server.client.get("/health").json()["slots"]["free"]
    return free


def make(server: LiveServer, name: str, **fields: object) -> dict[str, object]:
    response = server.client.post("/v1/states", json={"name": name, "prompt": "hello"} | fields)
    assert response.status_code == 201, response.text
    record: dict[str, object] = response.json()
    return record


def test_a_state_is_made_described_continued_and_deleted(server: LiveServer) -> None:
    made = make(server, "chat")
    assert (made["handle"], made["operation"], made["num_tokens"]) == ("chat@1", "prefill", 5)
    assert made["pending_token"] == ord("o") and made["tier"] == "device" and made["durable"] is False
    assert server.client.get("/v1/states/chat").json() == made
    whole = server.complete(prompt="hello there", max_tokens=6, temperature=0).json()["choices"]
    rest = server.complete(prompt=" there", state="chat", max_tokens=6, temperature=0).json()["choices"]
    assert rest == whole
    assert server.client.delete("/v1/states/chat@1").status_code == 204
    gone = server.client.get("/v1/states/chat@1")
    assert gone.status_code == 404 and error_of(gone)["code"] == "state_not_found"


def test_ids_make_the_same_state_as_their_text(server: LiveServer) -> None:
    ids = list(b"hello")
    response = server.client.post("/v1/states", json={"name": "ids", "prompt_ids": ids})
    assert response.status_code == 201
    make(server, "text")
    answers = [
        server.complete(prompt="", state=name, max_tokens=6, temperature=0).json()["choices"]
        for name in ("ids", "text")
    ]
    assert answers[0] == answers[1]


def test_forks_take_no_slot_and_know_their_parent(server: LiveServer) -> None:
    make(server, "root")
    free = free_slots(server)
    response = server.client.post("/v1/states/root/fork", json={"name": "branch", "n": 300})
    assert response.status_code == 201
    told = response.json()
    assert told["handle"] == "branch@1" and told["handles"] == [f"branch@{i}" for i in range(1, 301)]
    assert free_slots(server) == free
    lineage = server.client.get("/v1/states/branch@7/lineage").json()
    assert lineage["edges"] == [["root@1", "branch@7"]]
    assert {node["handle"] for node in lineage["nodes"]} == {"root@1", "branch@7"}


def test_pages_hold_every_state_once(server: LiveServer) -> None:
    make(server, "root")
    server.client.post("/v1/states/root/fork", json={"name": "page", "n": 10})
    server.client.patch("/v1/states/page@4", json={"tags": ["kept"]})
    seen, after = [], None
    while True:
        query = {"limit": "4", "name": "page"} | ({"after": after} if after else {})
        page = server.client.get("/v1/states", params=query).json()
        seen += [state["handle"] for state in page["data"]]
        if (after := page["next"]) is None:
            break
    assert seen == [f"page@{i}" for i in range(1, 11)]
    (tagged,) = server.client.get("/v1/states", params={"tag": "kept"}).json()["data"]
    assert tagged["handle"] == "page@4" and tagged["tags"] == ["kept"]
    assert server.client.get("/v1/states", params={"tier": "nvme"}).json() == {"data": [], "next": None}


def test_a_pinned_state_is_not_deleted(server: LiveServer) -> None:
    make(server, "kept")
    assert server.client.patch("/v1/states/kept", json={"pinned": True}).json()["pinned"] is True
    refused = server.client.delete("/v1/states/kept")
    assert refused.status_code == 409 and error_of(refused)["code"] == "state_pinned"
    assert server.client.patch("/v1/states/kept", json={"tags": ["a"]}).json()["pinned"] is True


def test_room_is_told_and_comes_back(server: LiveServer) -> None:
    made = []
    for number in range(20):
        response = server.client.post("/v1/states", json={"name": f"s{number}", "prompt": "hello"})
        if response.status_code != 201:
            break
        made.append(number)
    assert response.status_code == 429 and "retry-after" in response.headers and len(made) >= 4
    assert server.complete(prompt="a", max_tokens=2).status_code == 200
    assert server.client.delete("/v1/states/s0").status_code == 204
    make(server, "again")


def test_forks_are_counted(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    make(server, "root")
    monkeypatch.setattr(states, "MAX_STATES", 5)
    assert server.client.post("/v1/states/root/fork", json={"name": "b", "n": 5}).status_code == 429
    assert server.client.post("/v1/states/root/fork", json={"name": "b", "n": 4}).status_code == 201


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "", {"prompt": "a"}, 400, "name"),
        ("POST", "", {"name": "a b", "prompt": "a"}, 400, "name"),
        ("POST", "", {"name": "a"}, 400, "prompt"),
        ("POST", "", {"name": "a", "prompt": ""}, 400, "prompt"),
        ("POST", "", {"name": "a", "prompt": "a", "prompt_ids": [1]}, 400, "prompt"),
        ("POST", "", {"name": "a", "prompt_ids": [1, True]}, 400, "prompt_ids"),
        ("POST", "", {"name": "a", "prompt_ids": [10**9]}, 400, "prompt"),
        ("POST", "", {"name": "a", "prompt": "a", "durable": True}, 400, "durable"),
        ("POST", "", [], 400, None),
        ("GET", "?limit=0", None, 400, "limit"),
        ("GET", "?limit=many", None, 400, "limit"),
        ("GET", "?tier=moon", None, 400, "tier"),
        ("GET", "?after=nobody@1", None, 400, "after"),
        ("GET", "/no such", None, 400, "state"),
        ("GET", "/root@0", None, 400, "state"),
        ("GET", "/nobody", None, 404, "state"),
        ("GET", "/nobody/lineage", None, 404, "state"),
        ("DELETE", "/nobody@3", None, 404, "state"),
        ("PATCH", "/nobody", {"pinned": True}, 404, "state"),
        ("PATCH", "/root", {"pinned": 1}, 400, "pinned"),
        ("PATCH", "/root", {"tags": "a"}, 400, "tags"),
        ("PATCH", "/root", {"tags": [""]}, 400, "tags"),
        ("POST", "/nobody/fork", {"name": "a"}, 404, "state"),
        ("POST", "/root/fork", {"name": "a", "n": 0}, 400, "n"),
        ("POST", "/root/fork", {"name": "a", "n": 10**6}, 400, "n"),
        ("PUT", "/root", {}, 405, None),
    ],
)
def test_what_is_wrong_is_said(
    server: LiveServer, method: str, path: str, body: object, status: int, param: str | None
) -> None:
    make(server, "root")
    before = server.client.get("/v1/states").json()
    response = server.client.request(method, f"/v1/states{path}", json=body)
    assert response.status_code == status, response.text
    assert error_of(response)["param"] == param
    assert server.client.get("/v1/states").json() == before


def test_a_client_that_leaves_keeps_no_slot(server: LiveServer) -> None:
    for _ in range(10):
        connection = server.connect("/v1/states", name="left", prompt="x" * 400)
        connection.close()
    wait_until(lambda: server.num_open == 0)
    assert {state["name"] for state in server.client.get("/v1/states").json()["data"]} <= {"left"}


def test_the_schema_describes_the_calls(server: LiveServer) -> None:
    schema = server.client.get("/openapi.json").json()
    assert set(schema["paths"]["/v1/states/{handle}"]) == {"get", "patch", "delete"}
    example = schema["paths"]["/v1/states"]["post"]["requestBody"]["content"]["application/json"]["examples"]
    assert example["text"]["value"]["name"] == "facts"
    assert "422" not in schema["paths"]["/v1/states"]["get"]["responses"]
