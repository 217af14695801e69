"""OpenAI's Responses API: POST /v1/responses, and responses that are kept for the requests that build on them."""
