"""What passes between processes of one machine: the socket pair, the messages that every engine knows, arrays as frames
or in slots of shared memory, and who may read and write those, and when."""
