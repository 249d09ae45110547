"""The parts that policies are made of, one file per question: order, memory, tokens, batch, relief."""
