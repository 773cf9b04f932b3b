//! What volumes of tests have in common that are others but for one thing.

/// What a volume of a test leaves to the one that it is made over, in this field of it, but for requests and their scratch; `but geometry`: nor
/// that.
#[macro_export]
macro_rules! passes_on {
    ($inner:tt) => {
        $crate::passes_on!($inner but geometry);

        fn geometry(&self) -> $crate::Geometry {
            self.$inner.geometry()
        }
    };
    ($inner:tt but geometry) => {
        fn name(&self) -> &str {
            self.$inner.name()
        }

        fn resize(&self, blocks: $crate::BlockCount) -> Result<(), $crate::VolumeError> {
            self.$inner.resize(blocks)
        }

        fn format(&self, block_size: $crate::BlockSize) -> Result<(), $crate::VolumeError> {
            self.$inner.format(block_size)
        }

        fn usage(&self) -> $crate::Usage {
            self.$inner.usage()
        }
    };
}
