"""The door of the engine, and the only place that knows all constructors."""
