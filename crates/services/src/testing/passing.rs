//! What volumes of tests have in common that are others but for one thing.

/// What a volume of a test leaves to the one that it is made over, its first field, but for requests and their scratch.
macro_rules! passes_on {
    () => {
        fn name(&self) -> &str {
            self.0.name()
        }

        fn geometry(&self) -> ::millrace_block::Geometry {
            self.0.geometry()
        }

        fn resize(&self, blocks: ::millrace_block::BlockCount) -> Result<(), ::millrace_block::VolumeError> {
            self.0.resize(blocks)
        }

        fn format(&self, block_size: ::millrace_block::BlockSize) -> Result<(), ::millrace_block::VolumeError> {
            self.0.format(block_size)
        }

        fn usage(&self) -> ::millrace_block::Usage {
            self.0.usage()
        }
    };
}

pub(crate) use passes_on;
