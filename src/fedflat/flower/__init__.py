"""The methods as a Flower app: server and client side of a deployment. Needs `fedflat[flower]`."""

from fedflat.flower.client_app import client_app
from fedflat.flower.server_app import server_app

__all__ = ["client_app", "server_app"]
