"""The CAFE attack on vertical federated learning (arXiv 2110.15122), its theory and its defences."""

__version__ = "0.1.0"
