//! Dates for chat templates. Some templates print today's date through `strftime_now(format)`; this writes the fields
//! that templates use, in UTC, without a calendar library.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// From 1 January 1970, a Thursday.
const WEEKDAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const DAY: u64 = 86_400;

/// Seconds since 1970 by the system's clock; 0 for a clock before that.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

/// Year, month from 0, day from 1, day of the year from 1.
fn date(mut days: u64) -> (u64, usize, u64, u64) {
    // 400 years have 146,097 days, so whole periods are skipped and the loops are short.
    let mut year = 1970 + 400 * (days / 146_097);
    days %= 146_097;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let of_year = days + 1;
    let mut month = 0;
    for length in [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1, of_year)
}

/// `format` with the fields of `seconds` since 1970 in UTC. Errors: the field that is not known.
pub(super) fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    let (days, second) = (seconds / DAY, seconds % DAY);
    let (year, month, day, of_year) = date(days);
    let hour = second / 3600;
    let weekday = WEEKDAYS[(days % 7) as usize];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut field = chars.next();
        let bare = field == Some('-');
        if bare {
            field = chars.next();
        }
        let (value, width) = match field {
            Some('Y') => (year, 4),
            Some('y') => (year % 100, 2),
            Some('m') => (month as u64 + 1, 2),
            Some('d') => (day, 2),
            Some('j') => (of_year, 3),
            Some('H') => (hour, 2),
            Some('I') => ((hour + 11) % 12 + 1, 2),
            Some('M') => (second / 60 % 60, 2),
            Some('S') => (second % 60, 2),
            text => {
                out.push_str(match text {
                    Some('B') => MONTHS[month],
                    Some('b') => &MONTHS[month][..3],
                    Some('A') => weekday,
                    Some('a') => &weekday[..3],
                    Some('p') => ["AM", "PM"][usize::from(hour >= 12)],
                    Some('%') => "%",
                    other => return Err(format!("%{}", other.map(String::from).unwrap_or_default())),
                });
                continue;
            }
        };
        out.push_str(&if bare { value.to_string() } else { format!("{value:0width$}") });
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_dates() {
        let all = "%Y-%m-%d %H:%M:%S %A %a %B %b %j %y %I %p %-d%%";
        // Expected: Python's datetime.fromtimestamp(t, timezone.utc).strftime(all).
        assert_eq!(strftime(all, 0).unwrap(), "1970-01-01 00:00:00 Thursday Thu January Jan 001 70 12 AM 1%");
        assert_eq!(
            strftime(all, 951_827_696).unwrap(),
            "2000-02-29 12:34:56 Tuesday Tue February Feb 060 00 12 PM 29%"
        );
        assert_eq!(
            strftime(all, 4_102_444_799).unwrap(),
            "2099-12-31 23:59:59 Thursday Thu December Dec 365 99 11 PM 31%"
        );
        assert_eq!(strftime("%Q", 0), Err("%Q".into()));
        assert_eq!(strftime("%", 0), Err("%".into()));
    }
}
