"""Tests of the service over real sockets, with a scripted engine behind it."""
