"""What goes where: pure functions of the routing and of the shape, no communication."""
