"""EAGLE-3 drafters (arXiv 2503.01840): their configuration, weights and mathematics."""
