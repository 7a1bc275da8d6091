"""What front ends ask of the engine (`api`), and the only place that knows all constructors (`build`)."""
