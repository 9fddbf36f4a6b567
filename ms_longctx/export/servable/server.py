# SPDX-License-Identifier: Apache-2.0
"""Serves this folder with MindSpore Serving 2.0 on MindSpore Lite 2.0 (Python 3.7), over gRPC and REST.

``python3.7 server.py [--host 127.0.0.1] [--grpc_port 5500] [--rest_port 5501]``; Ctrl-C stops it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys

import mindspore_lite
from mindspore_serving import server

HERE = os.path.dirname(os.path.abspath(__file__))
_LINKED = "MS_LONGCTX_LITE_LINKED"


def start_again_with_libraries() -> None:
    """Serving looks for Lite's libraries under other names than Lite's package has; the loader reads its path once."""
    libraries = os.path.join(mindspore_lite.__path__[0], "lib")
    links = os.path.join(HERE, "lite_links")
    shutil.rmtree(links, ignore_errors=True)
    os.mkdir(links)
    for name in os.listdir(libraries):
        os.symlink(os.path.join(libraries, name), os.path.join(links, name.replace("_python.so", ".so")))
    os.symlink(os.path.join(libraries, "libmindspore-extendrt_python.so"), os.path.join(links, "libmindspore-lite.so"))
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([links, os.environ.get("LD_LIBRARY_PATH", "")])
    os.environ[_LINKED] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])


def check_ports(host: str, ports: list[int]) -> None:
    """Before anything starts: Serving finds a taken port late, and then the server that has it stops as well."""
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                sys.exit(f"error: {host}:{port}: {error.strerror}; choose others with --grpc_port and --rest_port")


def main() -> None:
    """Start the servable and both servers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--grpc_port", type=int, default=5500)
    parser.add_argument("--rest_port", type=int, default=5501)
    args = parser.parse_args()
    check_ports(args.host, [args.grpc_port, args.rest_port])
    if _LINKED not in os.environ:
        start_again_with_libraries()
    config = server.ServableStartConfig(servable_directory=HERE, servable_name="llama")
    try:
        server.start_servables(config, enable_lite=True)
        server.start_grpc_server(address=f"{args.host}:{args.grpc_port}")
        server.start_restful_server(address=f"{args.host}:{args.rest_port}")
    except RuntimeError as error:  # such as a port that is taken
        sys.exit(f"error: {error}")
    # One write that begins on a line of its own: a thread of Serving prints in pieces at this very moment.
    ready = f"\nserving {HERE}: gRPC {args.host}:{args.grpc_port}, REST {args.host}:{args.rest_port}\n"
    os.write(sys.stdout.fileno(), ready.encode())


if __name__ == "__main__":
    main()
