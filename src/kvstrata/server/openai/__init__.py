"""OpenAI's endpoints: schema (what may be asked), ask (to engine requests), reply (through the engine), choices (from
events to what is answered), answers (its types), stream (its events)."""
