//! The name of a PCI function.

use std::{fmt, str::FromStr};

use thiserror::Error;

/// Where a PCI function is: `domain:bus:device.function`, as `lspci -D` writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// Text that names no PCI function.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0:?} names no PCI function; write it as lspci -D does: 0000:01:00.0")]
pub struct ParseAddressError(String);

impl FromStr for PciAddress {
    type Err = ParseAddressError;

    fn from_str(text: &str) -> Result<Self, ParseAddressError> {
        let parse = || {
            let (slot, function) = text.rsplit_once('.')?;
            let mut parts = slot.rsplitn(3, ':');
            let hex = |text: &str, digits: usize, most: u32| {
                let fits = (1..=digits).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
                u32::from_str_radix(text, 16).ok().filter(|number| fits && *number <= most)
            };
            let (device, bus) = (hex(parts.next()?, 2, 0x1f)?, hex(parts.next()?, 2, 0xff)?);
            let domain = parts.next().map_or(Some(0), |text| hex(text, 8, u32::MAX))?;
            let function = hex(function, 1, 7)?;
            Some(Self { domain, bus: bus as u8, device: device as u8, function: function as u8 })
        };
        parse().ok_or_else(|| ParseAddressError(text.to_owned()))
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in ["0000:01:00.0", "0001:ff:1f.7", "10000:e1:00.0"] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), text);
        }
        assert_eq!("01:00.0".parse::<PciAddress>().unwrap().to_string(), "0000:01:00.0");
        for text in [
            "",
            "0000:01:00",
            "0000:01:20.0",
            "0000:01:00.8",
            "0000:001:00.0",
            "x:01:00.0",
            "../01:00.0",
            "0:1:+1.0",
            "1:2:3:4.0",
        ] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }
}
