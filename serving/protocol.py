"""Bodies of requests and answers, and how a body becomes a request.

Fields are OpenAI's, plus what this engine adds. Types are strict: `"1"` and `true` are no integers, and
NaN and Infinity are no JSON. A field that is null counts as absent. Fields that are not listed here are
ignored, as OpenAI-compatible servers do, so that clients written for others work; `if_version` and
`durable` are listed only to be refused, since ignoring them would promise what does not hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import from_json

from wkvm_jax.engine.request import (
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
)
from wkvm_jax.errors import RequestError, WkvmError
from wkvm_jax.store.records import NAME_PATTERN, Record, Tier

MAX_PROMPTS = 2048
"""Prompts in one request."""

MAX_CHOICES = 2048
"""Prompts times `n`: more would let one request fill the engine's queue."""

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""

FinishReason = Literal["stop", "length"]
"""How a whole choice ends. Requests that were cancelled or failed become errors instead."""

_PROMPT_SHAPES = "must be a string, a list of strings, a list of token ids, or a list of such lists"
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_STOP_SCHEMA = {
    "anyOf": [_STOP_STRING, {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS}]
}
_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -1e4, "maximum": 1e4},
    "maxProperties": MAX_LOGIT_BIAS,
}
_BIAS_KEY = re.compile(r"[0-9]{1,10}")
_ABOUT_FIELDS = ("title", "description", "default")
_NAME = NAME_PATTERN.pattern
_TOKEN_ID_MAX = (1 << 31) - 1
MAX_TAGS, MAX_TAG_LENGTH = 64, 256
MAX_FORKS = 10_000
"""Forks of one call, so that none holds the engine for long."""
_COUNT_MAX = 1 << 30


class BodyError(WkvmError):
    """A request's body is not a JSON object."""


class BodyTooLargeError(WkvmError):
    """A request's body is longer than the server takes."""


class BodyTimeoutError(WkvmError):
    """A request's body did not arrive in time."""


class ModelNotFoundError(WkvmError):
    """A request names a model that is not served here."""


def _prompts(value: object) -> list[str | list[int]]:
    """The prompts of a request, one or many, whatever shape they came in."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(_PROMPT_SHAPES)
    if not value:
        raise ValueError("is an empty list: give at least one prompt, and at least one token in it")
    # Types are compared as sets, since a prompt may have a million ids; `bool` is not `int` here.
    types = set(map(type, value))
    if types == {int}:
        return [value]
    if types == {str}:
        return [*value]
    if types == {list} and all(set(map(type, ids)) <= {int} for ids in value):
        return [*value]
    raise ValueError(_PROMPT_SHAPES)


def _stops(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and set(map(type, value)) <= {str}:
        return value
    raise ValueError("must be a string or a list of strings")


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not isinstance(key, str) or not _BIAS_KEY.fullmatch(key):
            raise ValueError(f"has the key {str(key)[:40]!r}, which is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= 1e4:
            raise ValueError(f"gives token {key} something that is no number from -10000 to 10000")
        biases[int(key)] = float(bias)
    return biases


Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
Stops = Annotated[list[str], PlainValidator(_stops), WithJsonSchema(_STOP_SCHEMA)]
Biases = Annotated[dict[int, float], PlainValidator(_biases), WithJsonSchema(_BIAS_SCHEMA)]
StateName = Annotated[str, Field(pattern=f"^{_NAME}$", description="Letters, digits, '.', '_' and '-'.")]
Tag = Annotated[str, Field(min_length=1, max_length=MAX_TAG_LENGTH)]
TokenId = Annotated[int, Field(ge=0, le=_TOKEN_ID_MAX)]
Number = Annotated[float, Field(allow_inf_nan=False)]


def _allow_null(schema: JsonDict) -> None:
    """Says in a JSON schema what `_RequestBody` does: null stands for an absent field."""
    properties, required = schema.get("properties"), schema.get("required", [])
    assert isinstance(properties, dict) and isinstance(required, list)
    null: JsonDict = {"type": "null"}
    for name, field in properties.items():
        assert isinstance(field, dict)
        if name not in required:
            about: JsonDict = {key: field[key] for key in _ABOUT_FIELDS if key in field}
            kind: JsonDict = {key: value for key, value in field.items() if key not in _ABOUT_FIELDS}
            options = kind.get("anyOf")
            options = options if isinstance(options, list) else [kind]
            properties[name] = {"anyOf": options if null in options else [*options, null], **about}


class _RequestBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", json_schema_extra=_allow_null)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: object) -> object:
        if isinstance(body, dict):
            return {key: value for key, value in body.items() if value is not None}
        return body


class StreamOptions(_RequestBody):
    """What a stream brings beside its tokens."""

    include_usage: bool = Field(False, description="End with a chunk that has the usage and no choices.")


class CompletionRequest(_RequestBody):
    """The body of `POST /v1/completions`. Unlisted fields are ignored; null is as good as absent."""

    prompt: Prompts = Field(
        description="Text or token ids, one prompt or several. Nothing is prepended. Empty only if `state` "
        "has a token pending."
    )
    model: str | None = Field(None, description="The served model; may be left out.")
    max_tokens: int = Field(DEFAULT_MAX_TOKENS, ge=0, le=_COUNT_MAX, description="0 only reads the prompt.")
    temperature: Number = Field(1.0, ge=0, le=1e4, description="0 always takes the most likely token.")
    top_p: Number = Field(1.0, ge=0, le=1, description="0 takes the most likely token.")
    n: int = Field(1, ge=1, description="Choices for each prompt, at most the engine's rows.")
    best_of: int | None = Field(None, ge=1, description="Only as large as `n`: nothing is ranked here.")
    stream: bool = Field(False, description="Answer with server-sent events, ended by `data: [DONE]`.")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="How many alternatives to show beside each token."
    )
    echo: bool = Field(
        False, description="Put the prompt before the text, and its log-probabilities if asked."
    )
    stop: Stops = Field(
        default_factory=list, description="Strings that end the text, which is cut before them."
    )
    presence_penalty: Number = Field(0.0, ge=-1e3, le=1e3)
    frequency_penalty: Number = Field(0.0, ge=-1e3, le=1e3)
    logit_bias: Biases = Field(default_factory=dict, description="Token ids, as strings, and what to add.")
    seed: int | None = Field(
        None,
        ge=-(1 << 63),
        le=(1 << 64) - 1,
        description="Repeats a choice exactly. Each prompt of a list gets what it would get alone. Without "
        "it every prompt draws afresh.",
    )
    user: str | None = Field(None, description="Ignored.")
    suffix: str | None = Field(None, description="Refused: this server does not insert text.")
    top_k: int = Field(0, ge=0, le=_COUNT_MAX, description="Draw from the k most likely tokens; 0 is all.")
    min_p: Number = Field(0.0, ge=0, le=1, description="Drop tokens below this share of the most likely one.")
    repetition_penalty: Number = Field(1.0, ge=1e-3, le=1e3, description="1 is off.")
    min_tokens: int = Field(0, ge=0, le=_COUNT_MAX, description="Tokens before anything can stop the text.")
    ignore_eos: bool = Field(False, description="Do not stop at the tokenizer's end-of-text tokens.")
    stop_token_ids: list[Annotated[int, Field(ge=0, le=_TOKEN_ID_MAX)]] = Field(
        default_factory=list, max_length=MAX_STOP_IDS
    )
    state: str | None = Field(
        None,
        pattern=f"^{_NAME}(@[1-9][0-9]{{0,17}})?$",
        description="Handle of a state to continue; it stays as it is.",
    )
    save_as: str | None = Field(
        None, pattern=f"^{_NAME}$", description="Name for the final state, for a request with one choice."
    )
    if_version: int | None = Field(None, description="Refused: this server does not compare versions yet.")
    durable: bool = Field(False, description="Only false: this server keeps states in memory.")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def checked(self) -> CompletionRequest:
        """Itself, if its fields fit together."""
        num_prompts = len(self.prompt)
        if num_prompts > MAX_PROMPTS:
            raise RequestError("prompt", f"{num_prompts} prompts; one request may have {MAX_PROMPTS}")
        if num_prompts * self.n > MAX_CHOICES:
            raise RequestError(
                "n", f"{num_prompts} prompts with n={self.n}: at most {MAX_CHOICES} choices in all"
            )
        if self.state is None and not all(self.prompt):
            raise RequestError("prompt", "prompt is empty: give at least one character or token")
        if self.best_of not in (None, self.n):
            raise RequestError("best_of", f"best_of={self.best_of} must equal n={self.n} or be left out")
        if self.suffix is not None:
            raise RequestError("suffix", "suffix is not supported: this server does not insert text")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "stream_options is only allowed with stream=true")
        if self.save_as is not None and num_prompts * self.n > 1:
            raise RequestError("save_as", "save_as needs a single prompt and n=1, since it names one state")
        if self.if_version is not None:
            raise RequestError("if_version", "if_version is not supported by this server")
        if self.durable:
            raise RequestError("durable", "durable=true is not supported: this server keeps states in memory")
        return self


class NewStateRequest(_RequestBody):
    """The body of `POST /v1/states`: one prompt, as text or as token ids."""

    name: StateName
    prompt: str | None = Field(None, min_length=1, description="Text. Nothing is prepended.")
    prompt_ids: list[TokenId] | None = Field(None, min_length=1, description="In place of `prompt`.")
    durable: bool = Field(False, description="Only false: this server keeps states in memory.")

    def checked_prompt(self) -> str | list[int]:
        """The prompt."""
        if self.durable:
            raise RequestError("durable", "durable=true is not supported: this server keeps states in memory")
        given: list[str | list[int]] = [p for p in (self.prompt, self.prompt_ids) if p is not None]
        if len(given) != 1:
            raise RequestError("prompt", "give either prompt or prompt_ids")
        return given[0]


class StateChange(_RequestBody):
    """The body of `PATCH /v1/states/{handle}`; what is absent stays as it is."""

    tags: list[Tag] | None = Field(None, max_length=MAX_TAGS, description="Replaces all tags.")
    pinned: bool | None = Field(None, description="A pinned state cannot be deleted.")


class ForkRequest(_RequestBody):
    """The body of `POST /v1/states/{handle}/fork`."""

    name: StateName
    n: int = Field(1, ge=1, le=MAX_FORKS, description="How many; they get successive versions of the name.")


def parse[Body: _RequestBody](body: bytes, kind: type[Body]) -> Body:
    """The request of a kind in `body`.

    Raises:
        BodyError: it is no JSON object.
        RequestError: a field is wrong, which `param` names.
    """
    return _parse(body, kind.model_validate)


def parse_completion(body: bytes) -> CompletionRequest:
    """The request in `body`.

    Raises:
        BodyError: it is no JSON object.
        RequestError: a field is wrong, which `param` names.
    """
    return _parse(body, CompletionRequest.model_validate).checked()


def _parse[Body](body: bytes, validate: Callable[[object], Body]) -> Body:
    if not body.strip():
        raise BodyError("the body is empty: it must be a JSON object")
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BodyError(f"the body is not valid JSON in UTF-8: {error}") from error
    if not isinstance(content, dict):
        raise BodyError(f"the body must be a JSON object, not {type(content).__name__}")
    try:
        return validate(content)
    except ValidationError as error:
        raise _request_error(error) from error


def query_error(error: RequestValidationError) -> RequestError:
    """What is wrong with a call's query, under the name of its parameter."""
    fault = error.errors()[0]
    param = str(fault["loc"][-1])
    return RequestError(param, f"{param}: {fault['msg'][0].lower()}{fault['msg'][1:]}")


def _request_error(error: ValidationError) -> RequestError:
    """The first fault that pydantic found, under the name of its field."""
    fault = error.errors(include_url=False, include_input=False)[0]
    param = str(fault["loc"][0])
    path = ".".join(map(str, fault["loc"]))
    if fault["type"] == "missing":
        return RequestError(param, f"{path} is required")
    if fault["type"] == "value_error":
        return RequestError(param, f"{path} {fault['ctx']['error']}")
    return RequestError(param, f"{path}: {fault['msg'][0].lower()}{fault['msg'][1:]}")


# Answers ------------------------------------------------------------------------------------------------


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """OpenAI's error object; every answer from status 400 on has it."""

    error: ErrorBody


class PromptTokensDetails(BaseModel):
    """A closer look at the prompt's tokens."""

    cached_tokens: int = Field(
        description="Tokens that a kept state had consumed, so that nothing read them again."
    )


class Usage(BaseModel):
    """Tokens counted. Each prompt counts once, however many choices it has."""

    prompt_tokens: int = Field(description="Tokens of the prompts, and those of continued states.")
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Logprobs(BaseModel):
    """Log-probabilities of tokens under the model itself, before temperature and penalties.

    A token is named by its text; if its bytes are no UTF-8 by `bytes:\\xe6\\xbc`, and by `token_id:7` for a
    model without tokenizer. `top_logprobs` includes the token itself. A prompt's first token has nulls.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Where each token begins in `text`, in characters.")


class Choice(BaseModel):
    """One answer, or a piece of it in a stream. Pieces join to exactly the whole."""

    index: int = Field(description="Number of the prompt times `n`, plus number of the choice.")
    text: str = Field(description="Empty for a model without tokenizer.")
    logprobs: Logprobs | None
    finish_reason: FinishReason | None = Field(description="Null until the choice's last piece.")
    token_ids: list[int] = Field(description="Generated tokens, without the prompt's.")


class StateInfo(BaseModel):
    """Where a final state was kept."""

    handle: str
    num_tokens: int
    durable: bool


class Completion(BaseModel):
    """The answer of `POST /v1/completions`, and every chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    state: StateInfo | None = Field(
        default=None, description="Only with `save_as`; in a stream with its last choice."
    )


class StateView(BaseModel):
    """What is known of a state. Only `tier`, `durable`, `tags` and `pinned` ever change."""

    handle: str = Field(description="`name@version`; a bare name means its newest version.")
    name: str
    version: int
    parents: list[str]
    operation: str
    params: dict[str, object]
    num_tokens: int = Field(description="Tokens of the conversation, the pending one included.")
    pending_token: int | None = Field(description="The last token, which the state has not consumed.")
    fingerprint: str = Field(description="Of the model.")
    dtype: str
    bytes: int
    tier: Tier
    durable: bool
    tags: list[str]
    pinned: bool
    created_s: float

    @classmethod
    def of(cls, record: Record) -> StateView:
        """A record, as JSON has it."""
        return cls(**{**vars(record), "parents": list(record.parents), "tags": list(record.tags)})


class StateList(BaseModel):
    """A page of states, in order of creation."""

    data: list[StateView]
    next: str | None = Field(description="What to give as `after` for the next page; null at the end.")


class ForkAnswer(BaseModel):
    """The new handles."""

    handle: str = Field(description="The first of them.")
    handles: list[str]


class Lineage(BaseModel):
    """States and who came from whom."""

    nodes: list[StateView]
    edges: list[tuple[str, str]] = Field(description="Pairs of parent and child.")


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "wkvm"


class ModelList(BaseModel):
    """The answer of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class SlotsInfo(BaseModel):
    """Places for states."""

    total: int
    free: int = Field(description="Those that a new request could take, reclaimable ones included.")


class Health(BaseModel):
    """The answer of `GET /health`."""

    status: Literal["ok"] = "ok"
    slots: SlotsInfo


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold: minus infinity becomes -9999, as OpenAI writes it."""
    return logprob if math.isfinite(logprob) else -9999.0
