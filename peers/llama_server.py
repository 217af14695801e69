"""llama.cpp's own server from PyPI's xllamacpp, for `kvstrata bench compare`: llama_server.py GGUF PORT [POOL_TOKENS].

Set as llama-server comes: four slots over one pool of KV of the model's context. With POOL_TOKENS the pool has room for
so many, and no copies of idle slots are kept beside it. Run by the environment that `make peers` made.
"""

import signal
import sys

import xllamacpp


def main() -> None:
    gguf, port, pool = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.port = port
    params.n_parallel = 4
    params.kv_unified = True
    params.n_ctx = pool
    if pool:
        params.cache_ram_mib = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
