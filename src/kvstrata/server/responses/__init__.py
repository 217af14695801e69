"""OpenAI's Responses API: POST /v1/responses, and stored responses for requests that build on them."""
