"""Gradients against the tangent space of the states: proxies, energies, controls, curvature, concepts."""
