"""The demonstration: a real ImageNet model stained, verified, and put through what happens to models."""

from stainlock.demo.run import Demonstration, run_demo

__all__ = ["Demonstration", "run_demo"]
