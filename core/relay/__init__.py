"""The device-resident relay between one step and the next: FutureMap, its payload, and input resolution."""
