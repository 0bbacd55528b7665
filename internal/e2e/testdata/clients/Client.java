import java.io.IOException;
import java.net.HttpURLConnection;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;

/** Posts to each URL with the HTTP clients of the JDK as they come, and prints how each exchange ended. */
public class Client {
    public static void main(String[] urls) throws Exception {
        for (String url : urls) {
            for (HttpClient.Version version : HttpClient.Version.values()) {
                if (!version.name().startsWith("HTTP_1_1") && !version.name().equals("HTTP_2")) {
                    continue;
                }
                HttpClient client = HttpClient.newBuilder().version(version).build();
                URI uri = URI.create(url + "/" + version);
                try {
                    var answer = client.send(HttpRequest.newBuilder(uri).POST(HttpRequest.BodyPublishers.ofString("x=1")).build(), BodyHandlers.ofString());
                    System.out.println(uri.getRawPath() + " " + answer.version() + " " + answer.statusCode() + " " + answer.body());
                } catch (IOException e) {
                    System.out.println(uri.getRawPath() + " " + e);
                }
            }
            URI uri = URI.create(url + "/old");
            var connection = (HttpURLConnection) uri.toURL().openConnection();
            connection.setDoOutput(true);
            try (var out = connection.getOutputStream()) {
                out.write("x=1".getBytes(StandardCharsets.UTF_8));
            }
            int status = connection.getResponseCode();
            var in = status < 400 ? connection.getInputStream() : connection.getErrorStream();
            System.out.println(uri.getRawPath() + " HTTP_1_1 " + status + " " + new String(in.readAllBytes(), StandardCharsets.UTF_8));
        }
    }
}
