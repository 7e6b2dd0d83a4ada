"""Health check: `python -m fedflat.flower.health 127.0.0.1:9000 [SECONDS]` exits with 0 if the service is up.

Containers and units use it for a SuperLink or SuperNode. It only reports on the process; `flwr supernode list` shows
which nodes are connected.
"""

from __future__ import annotations

import sys
import time


def serving(address: str, timeout: float = 5.0) -> bool:
    """Return whether the gRPC health service at an address answers SERVING."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def main(address: str, patience: float = 0.0) -> int:
    """Return the exit code: 0 once it serves, 1 if it does not within `patience` seconds."""
    end = time.monotonic() + patience
    while not serving(address):
        if time.monotonic() >= end:
            print(f"{address}: does not report that it is serving", file=sys.stderr)
            return 1
        time.sleep(0.5)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(float, sys.argv[2:3])))
