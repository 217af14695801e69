"""Tree of the errors that users and clients see. A few more are internal to the package that raises them.

    KvstrataError
    |-- ConfigError             a setting that makes no sense
    |   |-- UnsupportedCodec    codecs/: a precision that this version or head_dim does not support
    |   |-- MismatchedArrays    codecs/: arrays that do not belong together, or not to their codec
    |   `-- CacheDirectoryBusy  tiers/: another server uses the disk cache's folder
    |-- ModelError              a model that is missing, damaged or not supported
    `-- RequestError            a request that cannot be served; has the fields of an HTTP response
        |-- InvalidRequest      400: the client must change something
        |   `-- UnusableFile    a file that cannot be imported: damaged, another model's, or not what it should be
        |-- ContextTooLong      400: prompt and max_tokens do not fit the context
        |-- NeverFits           400: larger than the whole memory budget
        |-- MemoryPinned        400: pinned KV leaves too little memory
        |-- Unauthorized        401: no key, or not one of ours
        |-- Forbidden           403: a host or page that a server without keys does not answer; pins past a key's quota
        |-- ModelNotFound       404: another model's name
        |-- ResponseNotFound    404: a response that is not kept or belongs to another key
        |-- SessionNotFound     404: a session that is unknown or belongs to another key
        |-- ConversationNotFound 404: a conversation that is not cached or belongs to another key
        |-- RequestTimeout      408: headers or body did not arrive in time
        |-- BodyTooLarge        413: more bytes than the server reads
        |-- UnsupportedCoding   415: a content encoding that the server does not support
        |-- QueueFull           429: too many waiting requests; retry later
        |-- HeadersTooLarge     431: more bytes than the server reads before a body
        |-- ReplyFailed         500: the engine could not finish a reply
        `-- Unavailable         503: the server is draining, has too many connections or bodies, or its engine stopped

Messages say what is wrong and what to do next.
"""

from __future__ import annotations


class KvstrataError(Exception):
    """Base class of all errors that are shown to users and clients."""


class ConfigError(KvstrataError):
    pass


class CacheDirectoryBusy(ConfigError):
    pass


class ModelError(KvstrataError):
    pass


class RequestError(KvstrataError):
    status = 400
    type = "invalid_request_error"
    code: str | None = None
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(RequestError):
    pass


class UnusableFile(InvalidRequest):
    code = "unusable_file"


class ContextTooLong(RequestError):
    """The prompt, or the prompt plus max_tokens, exceeds the context.

    `num_tokens` and `max_tokens` are set when the prompt alone is too long, otherwise 0.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str | None = None, num_tokens: int = 0, max_tokens: int = 0) -> None:
        super().__init__(message, param=param)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class NeverFits(RequestError):
    code = "memory_limit_exceeded"


class MemoryPinned(RequestError):
    """Pinned KV leaves too little memory for the request.

    The status is neither 5xx nor 409: clients retry those again and again, and pins may never expire.
    """

    code = "memory_pinned"


class Unauthorized(RequestError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    status = 403
    type = "permission_error"


class ModelNotFound(RequestError):
    status = 404
    code = "model_not_found"


class ResponseNotFound(RequestError):
    status = 404
    code = "response_not_found"


class SessionNotFound(RequestError):
    status = 404
    code = "session_not_found"


class ConversationNotFound(RequestError):
    status = 404
    code = "conversation_not_found"


class RequestTimeout(RequestError):
    status = 408
    code = "request_timeout"


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class UnsupportedCoding(RequestError):
    status = 415
    code = "unsupported_content_encoding"


class QueueFull(RequestError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    retry_after_s = 2


class HeadersTooLarge(RequestError):
    status = 431
    code = "headers_too_large"


class ReplyFailed(RequestError):
    status = 500
    type = "server_error"
    code = "reply_failed"


class Unavailable(RequestError):
    status = 503
    type = "server_error"
    code = "unavailable"
    retry_after_s = 5
