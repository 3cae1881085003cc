"""How token rows are stored: shared by those who write them and those who train on them.

A row is uint16: the low 13 bits are an index into the list of tokens in use (its length stands
for any other token), and two bits are flags.
"""

ROW_LENGTH = 512
INDEX_MASK, START_OF_CHAT, GENERATED = 0x1FFF, 0x4000, 0x8000
IGNORED = INDEX_MASK

VOCAB_SIZE = 201_088
RETURN, CHANNEL, START, END, MESSAGE, CALL = 200002, 200005, 200006, 200007, 200008, 200012
CONSTRAIN, FIRST_SPECIAL = 200003, 199998
EOS_TOKEN_IDS = [RETURN, 199999, CALL]
