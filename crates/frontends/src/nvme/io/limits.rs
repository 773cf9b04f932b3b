//! What Identify tells about the I/O commands. 0's based values end in `_z`; a limit of 0 that Identify defines as "no
//! limit" is one, because long commands are worked through in pieces.

use millrace_nvme_spec::nvm::CopyFormat;

/// Maximum Single Source Range Length of Copy in logical blocks (MSSRL).
pub(crate) const MSSRL: u16 = 32_768;
/// Maximum Copy Length in logical blocks (MCL).
pub(crate) const MCL: u32 = 1 << 20;
/// Maximum Source Range Count of Copy (MSRC).
pub(crate) const MSRC_Z: u8 = 127;
/// Copy Descriptor Formats Supported (CDFS).
pub(crate) const CDFS: u16 = 1 << CopyFormat::SLBA_32.0 | 1 << CopyFormat::NSID_SLBA_32.0;
/// Formats that a host must enable first (Host Behavior Support, CDFE).
pub(crate) const CDFE: u16 = 1 << CopyFormat::NSID_SLBA_32.0;

/// Dataset Management Ranges Limit (DMRL): as many as a command can name.
pub(crate) const DMRL: u8 = 0;
/// Dataset Management Range Size Limit (DMRSL) in logical blocks: none.
pub(crate) const DMRSL: u32 = 0;
/// Dataset Management Size Limit (DMSL) in logical blocks: none.
pub(crate) const DMSL: u64 = 0;
/// Write Zeroes Size Limit (WZSL): none but NLB's.
pub(crate) const WZSL: u8 = 0;
/// Write Zeroes with Deallocate Size Limit (WZDSL): none but NLB's.
pub(crate) const WZDSL: u8 = 0;
/// Verify Size Limit (VSL): none but NLB's.
pub(crate) const VSL: u8 = 0;
/// Write Uncorrectable Size Limit (WUSL): none but NLB's.
pub(crate) const WUSL: u8 = 0;

/// Atomic Write Unit Normal (AWUN): one block.
pub(crate) const AWUN_Z: u16 = 0;
/// Atomic Write Unit Power Fail (AWUPF): one block.
pub(crate) const AWUPF_Z: u16 = 0;
/// Atomic Compare & Write Unit (ACWU): one block against power loss. Against other writes the whole pair is atomic (see
/// `gate`).
pub(crate) const ACWU_Z: u16 = 0;
