//! Macros for the two shapes of wire value: numbers that name things, and numbers with a table of meanings.

/// Methods every newtype over a wire integer has; `from_bits`/`into_bits` let it sit in a bit field.
macro_rules! wire_newtype {
    ($(#[$meta:meta])* $name:ident($repr:ty)) => {
        $(#[$meta])*
        #[derive(
            Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
            zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable,
        )]
        #[repr(transparent)]
        pub struct $name(pub $repr);

        impl $name {
            /// Wraps the value as it is on the wire.
            #[must_use]
            pub const fn from_bits(bits: $repr) -> Self {
                Self(bits)
            }

            /// The value as it is on the wire.
            #[must_use]
            pub const fn into_bits(self) -> $repr {
                self.0
            }
        }

        impl From<$repr> for $name {
            fn from(bits: $repr) -> Self {
                Self(bits)
            }
        }

        impl From<$name> for $repr {
            fn from(value: $name) -> Self {
                value.0
            }
        }
    };
}

/// An identifier: any value, printed as a decimal number.
macro_rules! wire_id {
    ($(#[$meta:meta])* $name:ident($repr:ty)) => {
        wire_newtype!($(#[$meta])* $name($repr));

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                core::fmt::Display::fmt(&self.0, f)
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }
    };
}

/// A number with a table of meanings: associated constants, `name()`, and `Display` in the specification's words.
macro_rules! wire_values {
    ($(#[$meta:meta])* $name:ident($repr:ty) { $($konst:ident = $value:literal, $text:literal;)+ }) => {
        wire_newtype!($(#[$meta])* $name($repr));

        impl $name {
            $(
                #[doc = concat!($text, " (", stringify!($value), ").")]
                pub const $konst: Self = Self($value);
            )+

            /// The specification's name of this value; `None` if it is reserved or not in our table.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some($text),)+
                    _ => None,
                }
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, "{:#04x}", self.0),
                }
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, concat!(stringify!($name), "({:#04x} {})"), self.0, self.name().unwrap_or("?"))
            }
        }
    };
}

/// Checks at compile time how many bytes a wire structure takes.
macro_rules! assert_size {
    ($($name:ty: $size:literal),+ $(,)?) => {
        $(const _: () = assert!(size_of::<$name>() == $size);)+
    };
}
