"""Drivers of event stores, one module each, which is loaded when a specifier names it."""
