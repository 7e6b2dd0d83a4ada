"""The catalogue as a Flower app: the server's and the client's side of a deployment. Needs `fedflat[flower]`."""

from fedflat.flower.client import client_app
from fedflat.flower.server import server_app

__all__ = ["client_app", "server_app"]
