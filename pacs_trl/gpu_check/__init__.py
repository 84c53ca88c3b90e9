"""What a GPU says about this package: parts that measure and compare, and the command that runs them one after another."""
