"""How far one weight mode takes a checkpoint from another, measured on the same tokens.

Both models read the same passages through the engine's own forward pass, the reference first: its
residual stream, its choices of experts and its last hidden states are kept, its weights are not, so
that two models which do not fit beside each other can be compared. The other model reads twice:

1. as it is, so that errors add up along the layers and reach the logits;
2. put back onto the reference's residual stream before every attention and every mixture of
   experts, so that what each of them adds is seen alone, with the reference's choice of experts.

Logits are recomputed from the last hidden states, some positions at a time: those of all tokens of
a vocabulary of 201,088 would not fit anywhere.
"""
